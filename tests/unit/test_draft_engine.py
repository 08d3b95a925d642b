"""A draft replica's engine, stepped by hand: what comes while a chain of guesses is made."""

from __future__ import annotations

import pytest

from cluster.core.step import SchedulerOutput
from cluster.messages.rounds import Close, Committed, DraftBlock, DraftCommand, Open
from tests.engines import Pool, draft_pool
from tests.fakes import ToyModel, sampling

pytestmark = pytest.mark.unit

PROMPT = (3, 1, 4)
RIGHT = ToyModel().continuation(PROMPT, sampling(ignore_eos=True), 20)


def opened(request_id: str = "r", draft_len: int = 6) -> Open:
    return Open(request_id, 0, PROMPT, sampling(ignore_eos=True), draft_len)


def pool_with(during_pass: int, command: DraftCommand) -> Pool:
    """A draft replica that is sent a command while the during_pass-th pass of its first chain runs."""
    pool = draft_pool(prefix_cache=False)
    passes = iter(range(during_pass))

    def deliver() -> None:
        if next(passes, None) == during_pass - 1:
            pool.engine.handle([command])

    pool.runner.before_pass = deliver
    pool.engine.handle([opened()])
    return pool


def rows(step: SchedulerOutput) -> list[tuple[str, int]]:
    return [(item.request_id, len(item.token_ids)) for item in step.scheduled]


def test_a_block_is_made_in_one_step() -> None:
    pool = draft_pool(clock=lambda: 0.0)
    pool.engine.handle([opened()])
    pool.engine.step()
    assert pool.of(DraftBlock) == [DraftBlock("r", 3, RIGHT[:6])]
    assert len(pool.runner.steps) == 1


def test_a_commit_overtakes_the_rest_of_a_chain() -> None:
    wrong = (RIGHT[0] + 1) % 50
    pool = pool_with(2, Committed("r", 0, 3, (wrong,), draft_len=2))
    pool.engine.step()
    assert pool.of(DraftBlock) == [], "cut after two guesses"
    pool.engine.step()
    (block,) = pool.of(DraftBlock)
    expected = ToyModel().continuation((*PROMPT, wrong), sampling(ignore_eos=True), 2)
    assert (block.committed_len, block.token_ids) == (4, expected)
    assert rows(pool.runner.steps[1]) == [("r", 1)]


def test_a_newcomer_joins_the_next_pass() -> None:
    pool = pool_with(1, opened("late", draft_len=2))
    pool.run()
    assert [rows(step) for step in pool.runner.steps] == [[("r", 3)], [("r", 1), ("late", 3)], [("r", 1)]]
    assert [(block.request_id, block.token_ids) for block in pool.of(DraftBlock)] == [
        ("late", RIGHT[:2]), ("r", RIGHT[:6]),
    ]  # fmt: skip


def test_closing_a_session_ends_its_chain() -> None:
    pool = pool_with(3, Close("r"))
    pool.run()
    assert (len(pool.runner.steps), pool.of(DraftBlock), pool.is_free()) == (1, [], True)
