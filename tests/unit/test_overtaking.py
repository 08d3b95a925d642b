"""A short prompt need not wait for the end of a long one before it; the long one keeps half of every step."""

from __future__ import annotations

import pytest

from cluster.core.block_pool import BlockPool
from cluster.core.draft_length import DraftLengthConfig, DraftLengthController
from cluster.core.kv_cache import KVCacheManager
from cluster.core.scheduler import Scheduler, SchedulerConfig
from cluster.core.step import SampledTokens, StepOutput
from cluster.messages.rounds import Submit
from tests.fakes import sampling

pytestmark = pytest.mark.unit

BUDGET = 512


class Prompts:
    """A scheduler that only prefills: every request ends with its first token."""

    def __init__(self) -> None:
        config = SchedulerConfig(64, BUDGET, 8192, 64, vocab_size=50)
        lengths = DraftLengthController(DraftLengthConfig())
        self.scheduler = Scheduler(config, KVCacheManager(BlockPool(4000), 16), lengths)
        self._num_submitted = 0

    def submit(self, request_id: str, prompt_len: int, tenant: str = "t", priority: int = 0) -> None:
        self._num_submitted += 1  # a beginning of its own, or the prefix would be shared
        prompt = (self._num_submitted % 50,) + (1 + self._num_submitted // 50,) * (prompt_len - 1)
        submit = Submit(request_id, prompt, sampling(1), tenant=tenant, priority=priority)
        assert self.scheduler.submit(submit, 0.0) is None

    def step(self) -> dict[str, int]:
        """Rows by request."""
        scheduled = self.scheduler.schedule(0.0).scheduled
        samples = {item.request_id: SampledTokens((1,) * item.num_samples) for item in scheduled}
        self.scheduler.apply(scheduled, StepOutput(samples), 0.0, 0.01)
        return {item.request_id: len(item.token_ids) for item in scheduled}


def test_a_short_prompt_goes_along_with_a_long_one_that_came_before() -> None:
    prompts = Prompts()
    prompts.submit("long", 6000)
    prompts.step()
    prompts.submit("short", 64)
    assert prompts.step() == {"long": BUDGET - 64, "short": 64}


def test_what_short_prompts_leave_over_is_the_long_ones() -> None:
    prompts = Prompts()
    prompts.submit("long", 6000)
    for number in range(10):
        prompts.submit(str(number), 100)
    rows = prompts.step()
    assert rows["long"] == BUDGET // 2
    assert sum(rows.values()) == BUDGET


def test_the_shortest_overtake_first() -> None:
    prompts = Prompts()
    prompts.submit("long", 6000)
    prompts.submit("middle", 1000)
    prompts.submit("short", 100)
    assert prompts.step() == {"long": BUDGET // 2, "short": 100, "middle": BUDGET // 2 - 100}


def test_a_long_prompt_takes_at_most_twice_as_many_steps_however_many_short_ones_come() -> None:
    prompts = Prompts()
    prompts.submit("long", 6000)
    num_rows, num_steps = 0, 0
    while num_rows < 6000:
        for number in range(8):
            prompts.submit(f"{num_steps}-{number}", 40)
        num_rows += prompts.step()["long"]
        num_steps += 1
    assert num_steps <= 2 * -(-6000 // BUDGET)


def test_a_less_important_prompt_overtakes_nobody() -> None:
    prompts = Prompts()
    prompts.submit("long", 6000)
    prompts.submit("short", 64, priority=1)
    assert prompts.step() == {"long": BUDGET}


def test_a_tenant_does_not_overtake_another_with_short_prompts() -> None:
    prompts = Prompts()
    prompts.submit("long", 3000, tenant="quiet")
    prompts.submit("longer", 3100, tenant="loud")
    prompts.submit("short", 64, tenant="loud")
    assert prompts.step() == {"long": BUDGET}
