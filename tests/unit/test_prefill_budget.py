"""Prompts beside running streams: their rows' cost is measured, and a step is stretched to twice its time at most."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.block_pool import BlockPool
from cluster.core.draft_length import DraftLengthConfig, DraftLengthController
from cluster.core.kv_cache import KVCacheManager
from cluster.core.prefill_budget import PromptAllowance, PromptCost, num_pairs
from cluster.core.scheduler import Scheduler, SchedulerConfig
from cluster.core.step import SampledTokens, ScheduledSequence, SchedulerOutput, StepOutput
from cluster.messages.request import DraftLengthMode, HoldMode
from cluster.messages.rounds import Submit
from tests.fakes import sampling

pytestmark = pytest.mark.unit

FIXED_S, ROW_S, PAIR_S = 10e-3, 0.3e-3, 0.3e-6


def measured(row_s: float = ROW_S, pair_s: float = PAIR_S) -> PromptCost:
    cost = PromptCost()
    for step in range(200):
        num_rows, start = 4 + step % 13, 40 * step
        pairs = num_pairs(start, num_rows)
        cost.observe(num_rows, pairs, row_s * num_rows + pair_s * pairs)
    return cost


@pytest.mark.parametrize(("row_s", "pair_s"), [(ROW_S, PAIR_S), (ROW_S, 0.0), (0.0, PAIR_S)])
def test_the_prices_of_rows_and_of_attention_are_told_apart(row_s: float, pair_s: float) -> None:
    cost = measured(row_s, pair_s)
    assert cost.row_s == pytest.approx(row_s, rel=0.05, abs=5e-6)
    assert cost.pair_s == pytest.approx(pair_s, rel=0.05, abs=1e-8)


def test_one_step_that_took_very_long_by_accident_is_forgotten() -> None:
    cost = measured()
    cost.observe(8, num_pairs(4000, 8), 30.0)
    assert cost.seconds(4000, 8) < 2 * (ROW_S * 8 + PAIR_S * num_pairs(4000, 8))


@given(st.floats(0, 1e-2), st.floats(0, 1e-4), st.floats(1e-4, 1), st.integers(0, 100_000))
def test_rows_within_a_time_are_as_many_as_take_it(row_s: float, pair_s: float, seconds: float, start: int) -> None:
    cost = PromptCost()
    cost.row_s, cost.pair_s = row_s, pair_s
    num_rows = cost.rows_within(seconds, start)
    if num_rows < 1e9:
        assert cost.seconds(start, int(num_rows)) <= seconds * (1 + 1e-6)
        assert cost.seconds(start, int(num_rows) + 1) >= seconds * (1 - 1e-6)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 600)), min_size=1, max_size=6), st.floats(0, 0.1))
def test_an_allowance_is_shared_out_once_and_always_gets_the_first_prompt_on(
    prompts: list[tuple[int, int]], seconds: float
) -> None:
    cost = measured()
    allowance = PromptAllowance(cost, 64, seconds)
    rows = [allowance.take(start, num_wanted) for start, num_wanted in prompts]
    assert rows[0] >= 1
    assert sum(rows) <= 64
    taken_s = sum(cost.seconds(start, num_rows) for (start, _), num_rows in zip(prompts, rows, strict=True))
    assert taken_s <= max(seconds * (1 + 1e-6), cost.seconds(prompts[0][0], 1))


class Machine:
    """A scheduler on a machine whose steps take what the formula says, give or take `noise`."""

    def __init__(self, hold: HoldMode = HoldMode.NEVER, noise: float = 0.0) -> None:
        config = SchedulerConfig(8, 512, 8192, 8, vocab_size=50, hold=hold, max_hold_s=1.0)
        lengths = DraftLengthController(DraftLengthConfig(DraftLengthMode.FIXED))
        self.scheduler = Scheduler(config, KVCacheManager(BlockPool(1000), 16), lengths)
        self.now = 0.0
        self._random, self._noise = Random(0), noise

    def submit(self, request_id: str, prompt_len: int, max_draft_tokens: int = 0) -> None:
        submit = Submit(request_id, (1,) * prompt_len, sampling(2000, ignore_eos=True), max_draft_tokens)
        assert self.scheduler.submit(submit, self.now) is None

    def seconds(self, items: tuple[ScheduledSequence, ...]) -> float:
        pairs = sum(num_pairs(item.start, len(item.token_ids)) for item in items)
        exact = FIXED_S + ROW_S * sum(len(item.token_ids) for item in items) + PAIR_S * pairs
        return exact * (1 + self._noise * self._random.uniform(-1, 1))

    def step(self) -> tuple[SchedulerOutput, float]:
        output = self.scheduler.schedule(self.now)
        step_s = self.seconds(output.scheduled)
        self.now += step_s
        samples = {item.request_id: SampledTokens((1,) * item.num_samples) for item in output.scheduled}
        self.scheduler.apply(output.scheduled, StepOutput(samples), self.now, step_s)
        return output, step_s

    def start_streams(self) -> None:
        for name in "abcd":
            self.submit(name, 20)
        for _ in range(5):
            self.step()


@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_a_long_prompt_stretches_the_steps_of_running_streams_to_twice_their_time_at_most(noise: float) -> None:
    machine = Machine(noise=noise)
    machine.start_streams()
    machine.submit("long", 6000)
    num_rows: list[int] = []
    while sum(num_rows) < 6000:
        output, step_s = machine.step()
        assert {item.request_id for item in output.scheduled} >= set("abcd"), "every stream runs in every step"
        plain_s = machine.seconds(tuple(item for item in output.scheduled if item.request_id != "long"))
        assert step_s <= 2.1 * plain_s * (1 + noise) / (1 - noise)
        num_rows.append(output.num_scheduled_tokens - 4)
    assert len(num_rows) < 800
    assert num_rows.count(0) <= 1 + len(num_rows) / 64
    first, last = sum(num_rows[10:60]), sum(num_rows[-51:-1])
    assert first > 2 * last > 0, "late rows attend to more, so a step has fewer of them"


def test_a_prompt_has_the_whole_budget_while_nothing_decodes() -> None:
    machine = Machine()
    machine.submit("long", 2000)
    assert [machine.step()[0].num_scheduled_tokens for _ in range(4)] == [512, 512, 512, 464]


def test_streams_that_wait_for_their_blocks_are_not_held_up_by_a_prompt_either() -> None:
    machine = Machine(HoldMode.DEADLINE)
    for name in "abcd":
        machine.submit(name, 20, max_draft_tokens=4)
    plain_s = machine.step()[1]
    machine.submit("long", 3000)
    output, step_s = machine.step()
    assert [item.request_id for item in output.scheduled] == ["long"]
    assert step_s <= 2 * plain_s


def test_what_streams_take_by_themselves_is_measured_again_and_again() -> None:
    machine = Machine()
    machine.start_streams()
    machine.submit("long", 8000)
    alone = [step for step in range(200) if machine.step()[0].num_scheduled_tokens == 4]
    assert alone == [64, 129, 194]
