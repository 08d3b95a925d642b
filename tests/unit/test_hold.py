"""A sequence whose block is on its way may sit out a step: when, how long, and what is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.core.block_pool import BlockPool
from cluster.core.draft_length import DraftLengthConfig, DraftLengthController, DraftLengthState
from cluster.core.kv_cache import KVCacheManager
from cluster.core.scheduler import Scheduler, SchedulerConfig
from cluster.core.step import SchedulerOutput
from cluster.core.tactics import Tactic
from cluster.messages.request import DraftLengthMode, HoldMode
from cluster.messages.rounds import Commit, DraftBlock, SetDraftLimit, Submit
from tests.fakes import ToyModel, ToyRunner, sampling

pytestmark = pytest.mark.unit

MODEL = ToyModel()
PROMPT = (2, 7, 1)
MAX_HOLD_S = 0.5
STEP_S = 0.1


class Target:
    """One request on a scheduler, and its drafter."""

    def __init__(self, hold: HoldMode, step_s: float = STEP_S, tactic: Tactic = Tactic.OVERLAP) -> None:
        self.step_s = step_s
        config = SchedulerConfig(8, 64, 512, 8, vocab_size=50, hold=hold, max_hold_s=MAX_HOLD_S)
        self.controller = DraftLengthController(DraftLengthConfig(DraftLengthMode.FIXED, tactics=(tactic,)))
        self.scheduler = Scheduler(config, KVCacheManager(BlockPool(200), 16), self.controller)
        self.runner = ToyRunner(16, MODEL)
        self.request = Submit("a", PROMPT, sampling(400), max_draft_tokens=4)
        self.tokens = {"a": PROMPT}
        self.now = 0.0
        assert self.scheduler.submit(self.request, 0.0) is None
        self.step()

    def schedule(self, after_s: float = 0.0) -> SchedulerOutput:
        self.now += after_s
        return self.scheduler.schedule(self.now)

    def step(self, output: SchedulerOutput | None = None) -> Commit:
        """Run the step; the first request's commit."""
        output = output or self.schedule()
        result = self.runner.execute(output)
        self.now += self.step_s
        commits = self.scheduler.apply(output.scheduled, result, self.now, self.step_s)
        for commit in commits:
            self.tokens[commit.request_id] += commit.token_ids
        return next(commit for commit in commits if commit.request_id == "a")

    def propose(self, num_right: int = 4, after_s: float = 0.0, request_id: str = "a") -> None:
        self.now += after_s
        tokens = self.tokens[request_id]
        guesses = MODEL.continuation(tokens, self.request.sampling, num_right)
        self.scheduler.propose(DraftBlock(request_id, len(tokens), guesses, draft_time_s=after_s / 2), self.now)

    def add(self, request_id: str, max_draft_tokens: int) -> None:
        request = replace(self.request, request_id=request_id, max_draft_tokens=max_draft_tokens)
        self.tokens[request_id] = PROMPT
        assert self.scheduler.submit(request, self.now) is None

    def round(self, arrival_s: float) -> Commit:
        """Wait for a block that takes so long, then verify it."""
        self.schedule()
        self.propose(after_s=arrival_s)
        return self.step()

    @property
    def holds(self) -> dict[str, int]:
        return {outcome: number for outcome, number in self.scheduler.stats().holds.items() if number}


def test_never_means_never() -> None:
    target = Target(HoldMode.NEVER)
    assert target.schedule().scheduled
    assert target.holds == {}


def test_with_a_deadline_a_sequence_is_held_until_its_block_comes() -> None:
    target = Target(HoldMode.DEADLINE)
    asked_at = target.now
    assert target.schedule(0.2) == SchedulerOutput(wake_at=asked_at + MAX_HOLD_S)
    target.propose(after_s=0.1)
    commit = target.step()
    assert commit.num_accepted_tokens == 4
    assert commit.timings.held_s == pytest.approx(0.1)
    assert target.holds == {"arrived": 1}


def test_with_a_deadline_a_sequence_is_held_no_longer_than_that_after_its_commit() -> None:
    target = Target(HoldMode.DEADLINE)
    assert not target.schedule(0.2).scheduled
    assert target.schedule(MAX_HOLD_S).scheduled
    assert target.holds == {"expired": 1}


def test_a_deadline_that_has_passed_before_the_first_look_is_no_hold() -> None:
    target = Target(HoldMode.DEADLINE)
    assert target.schedule(MAX_HOLD_S).scheduled
    assert target.holds == {"not_worth": 1}


def test_word_that_no_guess_will_come_ends_the_hold() -> None:
    target = Target(HoldMode.DEADLINE)
    target.schedule()
    target.propose(num_right=0, after_s=0.1)
    assert target.step().num_draft_tokens == 0
    assert target.holds == {"declined": 1}


def test_word_that_no_guess_will_come_prevents_a_hold_that_has_not_begun() -> None:
    target = Target(HoldMode.DEADLINE)
    target.propose(num_right=0)
    assert target.schedule().scheduled
    assert target.holds == {}


def test_word_about_an_earlier_commit_does_not_end_the_hold() -> None:
    target = Target(HoldMode.DEADLINE)
    target.schedule()
    target.scheduler.propose(DraftBlock("a", len(target.tokens["a"]) - 1, ()), target.now)
    assert not target.schedule().scheduled


def test_a_held_sequence_does_not_block_others() -> None:
    target = Target(HoldMode.DEADLINE)
    target.schedule()
    target.add("b", max_draft_tokens=0)
    output = target.schedule()
    assert [item.request_id for item in output.scheduled] == ["b"]
    assert output.wake_at is not None


def test_a_deadline_of_any_request_ends_the_sleep() -> None:
    target = Target(HoldMode.DEADLINE)
    now = target.now
    waiting = replace(target.request, request_id="b", deadline_s=0.1)
    assert target.scheduler.submit(waiting, now) is None
    assert target.schedule().wake_at == pytest.approx(now + 0.1)


def test_a_limit_of_none_ends_the_wait_at_once_and_no_later_step_waits() -> None:
    target = Target(HoldMode.DEADLINE)
    assert target.schedule().scheduled == ()
    target.scheduler.set_draft_limit(SetDraftLimit("a", 0))
    for _ in range(3):
        assert target.step().next_draft_len == 0
    assert target.holds == {"declined": 1}
    target.scheduler.set_draft_limit(SetDraftLimit("a", 2))
    assert target.step().next_draft_len == 2
    assert target.schedule().scheduled == ()


def test_guesses_that_came_before_a_limit_of_none_are_not_verified() -> None:
    target = Target(HoldMode.DEADLINE)
    target.propose()
    target.scheduler.set_draft_limit(SetDraftLimit("a", 0))
    assert target.step().num_draft_tokens == 0


def test_a_quick_draft_is_worth_a_hold() -> None:
    target = Target(HoldMode.BREAK_EVEN)
    for _ in range(6):
        assert target.round(arrival_s=0.01).num_accepted_tokens == 4
    output = target.schedule()
    assert not output.scheduled
    assert output.wake_at is not None
    assert target.now < output.wake_at < target.now + STEP_S
    assert target.holds == {"arrived": 6}


def test_a_draft_slower_than_the_break_even_is_not_worth_a_hold() -> None:
    target = Target(HoldMode.BREAK_EVEN)
    target.round(arrival_s=0.02)
    for _ in range(3):
        target.propose(after_s=0.099)
        target.step()
    assert target.schedule().scheduled
    assert target.holds["not_worth"] == 1


def test_where_waiting_was_found_to_pay_it_may_take_all_that_the_guesses_add() -> None:
    target = Target(HoldMode.BREAK_EVEN, tactic=Tactic.WAIT)
    for _ in range(3):
        assert target.round(arrival_s=0.15).num_accepted_tokens == 4
    began = target.now
    wake_at = target.schedule().wake_at
    assert wake_at is not None
    assert began + STEP_S < wake_at < began + 4 * STEP_S
    assert target.holds == {"arrived": 3}


def test_a_block_after_a_time_without_any_says_nothing_about_the_next_ones() -> None:
    target = Target(HoldMode.DEADLINE)
    target.round(arrival_s=0.01)
    target.round(arrival_s=0.01)
    known_s = target.controller.arrival_s(DraftLengthState(4), 4)
    target.scheduler.set_draft_limit(SetDraftLimit("a", 0))
    target.step()
    target.scheduler.set_draft_limit(SetDraftLimit("a", 4))
    target.step()
    target.round(arrival_s=0.4)  # its drafter has to catch up
    assert target.controller.arrival_s(DraftLengthState(4), 4) == known_s


def test_a_hold_ends_when_it_has_cost_what_it_was_worth() -> None:
    target = Target(HoldMode.BREAK_EVEN)
    target.round(arrival_s=0.01)
    output = target.schedule()
    assert output.wake_at is not None
    target.now = output.wake_at
    assert target.schedule().scheduled
    assert target.holds == {"arrived": 1, "expired": 1}


def test_after_a_vain_hold_the_next_one_waits_until_the_drafter_has_shown_itself() -> None:
    target = Target(HoldMode.BREAK_EVEN)
    target.round(arrival_s=0.01)
    target.schedule()
    target.step(target.schedule(STEP_S))
    assert target.step().num_draft_tokens == 0
    assert target.holds == {"arrived": 1, "expired": 1, "not_worth": 1}
    target.propose(after_s=0.001)
    target.step()
    assert not target.schedule().scheduled


@pytest.mark.parametrize("max_draft_tokens", [0, 4])
def test_nobody_waits_while_a_prompt_is_read_or_beside_one_that_never_speculates(max_draft_tokens: int) -> None:
    target = Target(HoldMode.BREAK_EVEN)
    for _ in range(3):
        target.round(arrival_s=0.01)
    assert not target.schedule().scheduled
    target.add("b", max_draft_tokens)
    assert [item.request_id for item in target.schedule().scheduled] == ["a", "b"]
    target.step(target.schedule())
    assert (len(target.schedule().scheduled) == 2) == (max_draft_tokens == 0)


def test_a_step_waits_for_the_last_block_and_then_verifies_all_of_them() -> None:
    target = Target(HoldMode.BREAK_EVEN)
    target.add("b", max_draft_tokens=4)
    target.step()
    target.step()
    for _ in range(4):
        assert not target.schedule().scheduled
        target.propose(after_s=0.01)
        assert not target.schedule().scheduled, "b's block is due"
        target.propose(request_id="b", after_s=0.005)
        output = target.schedule()
        assert [item.num_draft_tokens for item in output.scheduled] == [4, 4]
        assert target.step(output).timings.held_s == pytest.approx(0.015)
    assert target.holds == {"not_worth": 2, "arrived": 8}


def test_no_hold_lasts_longer_than_the_limit_however_much_it_is_worth() -> None:
    target = Target(HoldMode.BREAK_EVEN, step_s=10.0)
    asked_at = target.now
    assert target.schedule(0.1).wake_at == asked_at + MAX_HOLD_S


def test_a_block_that_came_too_late_still_tells_how_good_the_drafter_is() -> None:
    rates = []
    for is_right in (True, False):
        target = Target(HoldMode.NEVER)
        for _ in range(20):
            asked_len = len(target.tokens["a"])
            target.step()
            guess = target.tokens["a"][asked_len]
            target.scheduler.propose(DraftBlock("a", asked_len, (guess if is_right else guess ^ 1,)), target.now)
        rates.append(target.controller.acceptance_rate(DraftLengthState(4)))
    assert rates[0] > 0.8
    assert rates[1] < 0.3
