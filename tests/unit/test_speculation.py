"""What the router's half of a round does with each commit, block and loss."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.core.draft_watch import Patience
from cluster.core.speculation import (
    Action,
    CloseDraft,
    DropCause,
    Dropped,
    Emit,
    Fallback,
    FallbackCause,
    OpenDraft,
    Propose,
    RoundDone,
    SpeculationLimits,
    SpeculationSession,
    ToDraft,
)
from cluster.messages.answer import FinishReason, TokenLogprobs
from cluster.messages.request import Drafter, SamplingParams
from cluster.messages.rounds import Commit, Committed, DraftBlock, Open

pytestmark = pytest.mark.unit

PROMPT = (1, 2, 3)
SAMPLING = SamplingParams(max_tokens=100, seed=1)
PATIENCE = Patience(max_missed_rounds=3, max_silence_s=2.0, max_open_s=10.0)


def session(drafter: Drafter = Drafter.MODEL, max_draft_tokens: int = 4) -> SpeculationSession:
    """A session that has started; for a draft model its first opening is behind it."""
    fresh = SpeculationSession("r", PROMPT, SAMPLING, limits=SpeculationLimits(PATIENCE, 2, 5))
    fresh.on_decision(drafter, max_draft_tokens)
    return fresh


def commit(base_len: int, *token_ids: int, wants: int = 4, **fields: Any) -> Commit:
    return Commit("r", base_len, token_ids, wants, **fields)


def block(committed_len: int, *token_ids: int, epoch: int = 1) -> DraftBlock:
    return DraftBlock("r", committed_len, token_ids, epoch, draft_time_s=0.01)


def proposals(actions: list[Action]) -> list[tuple[int, tuple[int, ...]]]:
    return [(a.block.committed_len, a.block.token_ids) for a in actions if isinstance(a, Propose)]


def drafters(actions: list[Action]) -> list[Drafter]:
    return [action.drafter for action in actions if isinstance(action, Emit)]


def test_starting_with_a_draft_model_opens_a_session_on_the_prompt() -> None:
    fresh = SpeculationSession("r", PROMPT, SAMPLING, tenant="t")
    assert fresh.on_decision(Drafter.MODEL, 4) == [OpenDraft(Open("r", 1, PROMPT, SAMPLING, 0, "t", len(PROMPT)))]


def test_a_commit_goes_to_the_draft_before_it_goes_to_the_client() -> None:
    first = commit(3, 7)
    assert session().on_commit(first, 0.0) == [ToDraft(Committed("r", 1, 3, (7,), 4)), Emit(first)]


def test_no_more_guesses_are_asked_for_than_the_decision_allows() -> None:
    (to_draft, _) = session(max_draft_tokens=2).on_commit(commit(3, 7, wants=4), 0.0)
    assert isinstance(to_draft, ToDraft)
    assert to_draft.command.draft_len == 2


def test_only_a_draft_model_is_asked_for_more_than_what_pays_unseen() -> None:
    asked = commit(3, 1, 2, 3, 1, wants=1, longest_draft_len=3, min_confidence=0.25)
    (to_draft, _) = session().on_commit(asked, 0.0)
    assert to_draft == ToDraft(Committed("r", 1, 3, (1, 2, 3, 1), 1, 0.25, 3))
    assert proposals(session(Drafter.NGRAM).on_commit(asked, 0.0)) == [(7, (2,))]


def test_a_block_is_proposed_and_its_round_is_timed() -> None:
    speculation = session()
    speculation.on_commit(commit(3, 7), 1.0)
    answer = block(4, 8, 9)
    assert speculation.on_block(answer, 1.5) == [Propose(answer), RoundDone(Drafter.MODEL, 0.5, 0.01, 2)]


def test_an_empty_block_is_passed_on_so_that_the_target_stops_waiting() -> None:
    speculation = session()
    speculation.on_commit(commit(3, 7), 0.0)
    assert proposals(speculation.on_block(block(4), 0.1)) == [(4, ())]


def test_a_block_is_taken_once() -> None:
    speculation = session()
    speculation.on_commit(commit(3, 7), 0.0)
    speculation.on_block(block(4, 8), 0.1)
    assert speculation.on_block(block(4, 8), 0.2) == [Dropped(DropCause.OLD_BLOCK)]


def test_a_late_block_whose_beginning_came_true_is_proposed_with_its_own_stamp() -> None:
    """So that the target sees how long it took from the commit that asked for it."""
    speculation = session(max_draft_tokens=2)
    speculation.on_commit(commit(3, 7), 0.0)
    speculation.on_commit(commit(4, 8), 0.1)
    assert proposals(speculation.on_block(block(4, 8, 9, 10, 11), 0.2)) == [(4, (8, 9, 10))]


def test_a_verification_names_the_drafter_of_its_guesses_not_the_present_one() -> None:
    speculation = session()
    speculation.on_commit(commit(3, 7), 0.0)
    speculation.on_block(block(4, 2), 0.1)
    speculation.on_decision(Drafter.NGRAM, 4)
    actions = speculation.on_commit(commit(4, 2, 3, num_draft_tokens=1), 0.2)
    assert proposals(actions) == [(6, (7, 2, 3, 7))]
    assert drafters(actions) == [Drafter.MODEL]
    speculation.on_decision(Drafter.MODEL, 4)
    assert drafters(speculation.on_commit(commit(6, 7, 8, num_draft_tokens=3), 0.3)) == [Drafter.NGRAM]
    assert drafters(speculation.on_commit(commit(8, 5), 0.4)) == [Drafter.NONE]


def test_a_verification_names_the_drafter_even_if_commits_overtake_each_other() -> None:
    speculation = session(Drafter.NGRAM)
    speculation.on_commit(commit(3, 1, 2), 0.0)
    speculation.on_decision(Drafter.MODEL, 4)
    second = commit(6, 9, 1, num_draft_tokens=1)
    assert speculation.on_commit(second, 0.1) == []
    actions = speculation.on_commit(commit(5, 3, num_draft_tokens=2), 0.1)
    assert drafters(actions) == [Drafter.NGRAM, Drafter.NGRAM]


@pytest.mark.parametrize("late", [block(4, 6, 9), block(4, 8), block(4)], ids=["wrong", "used up", "empty"])
def test_a_late_block_with_nothing_left_is_dropped(late: DraftBlock) -> None:
    speculation = session()
    speculation.on_commit(commit(3, 7), 0.0)
    speculation.on_commit(commit(4, 8), 0.1)
    assert speculation.on_block(late, 0.2) == [Dropped(DropCause.OLD_BLOCK)]


def test_a_block_of_another_session_is_dropped() -> None:
    speculation = session()
    speculation.on_commit(commit(3, 7), 0.0)
    assert speculation.on_block(block(4, 8, epoch=0), 0.1) == [Dropped(DropCause.OLD_EPOCH)]
    assert speculation.on_block(block(4, 8, epoch=2), 0.1) == [Dropped(DropCause.OLD_EPOCH)]


def test_a_block_after_tokens_that_nobody_committed_is_dropped() -> None:
    assert session().on_block(block(9, 8), 0.1) == [Dropped(DropCause.EARLY_BLOCK)]


def test_a_lost_draft_releases_a_waiting_target_and_the_next_session_starts_where_the_output_is() -> None:
    speculation = session()
    speculation.on_commit(commit(3, 7), 0.0)
    actions = speculation.on_draft_lost(FallbackCause.LOST)
    assert actions == [Propose(block(4).__class__("r", 4, (), 1)), CloseDraft(), Fallback(FallbackCause.LOST)]
    assert proposals(speculation.on_commit(commit(4, 8), 0.1)) == [(5, ())]
    assert speculation.on_decision(Drafter.MODEL, 4) == [
        OpenDraft(Open("r", 2, (*PROMPT, 7, 8), SAMPLING, 0, num_prompt_tokens=3))
    ]


def test_losing_a_draft_twice_counts_once() -> None:
    speculation = session()
    speculation.on_draft_lost(FallbackCause.LOST)
    assert speculation.on_draft_lost(FallbackCause.LOST) == []


def test_a_draft_that_misses_too_many_rounds_is_given_up() -> None:
    speculation = session()
    speculation.on_commit(commit(3, 7), 0.0)
    speculation.on_block(block(4), 0.0)
    for index in range(3):
        assert isinstance(speculation.on_commit(commit(4 + index, 8), 0.1)[0], ToDraft)
    actions = speculation.on_commit(commit(7, 8), 0.1)
    assert actions[:3] == [Propose(DraftBlock("r", 8, (), 1)), CloseDraft(True), Fallback(FallbackCause.SLOW)]
    assert actions[3] == Emit(commit(7, 8))


def test_a_late_block_that_helps_is_no_reason_to_give_up() -> None:
    speculation = session()
    speculation.on_commit(commit(3, 8), 0.0)
    for length in range(4, 30):
        speculation.on_commit(commit(length, 8), 0.1)
        assert proposals(speculation.on_block(block(length, 8, 8), 0.1)) == [(length, (8, 8))]
    assert speculation.drafter is Drafter.MODEL


def test_a_draft_that_is_silent_for_too_long_is_given_up() -> None:
    speculation = session()
    speculation.on_commit(commit(3, 7), 0.0)
    speculation.on_block(block(4), 0.1)
    speculation.on_commit(commit(4, 8), 1.0)
    assert Fallback(FallbackCause.SLOW) in speculation.on_commit(commit(5, 8), 3.0)


def test_a_draft_may_take_its_time_over_the_prompt() -> None:
    speculation = session()
    for index in range(20):
        assert isinstance(speculation.on_commit(commit(3 + index, 8), index * 0.49)[0], ToDraft)
    assert Fallback(FallbackCause.SLOW) in speculation.on_commit(commit(23, 8), 10.1)


def test_silence_means_nothing_while_no_guesses_are_wanted() -> None:
    speculation = session()
    speculation.on_commit(commit(3, 7), 0.0)
    speculation.on_commit(commit(4, 7, wants=0), 1.0)
    speculation.on_commit(commit(5, 7, wants=0), 100.0)
    assert isinstance(speculation.on_commit(commit(6, 7), 200.0)[0], ToDraft)


def test_turning_speculation_off_releases_the_target_and_closes_the_draft() -> None:
    speculation = session()
    speculation.on_commit(commit(3, 7), 0.0)
    actions = speculation.on_decision(Drafter.NONE, 0)
    assert actions == [Propose(DraftBlock("r", 4, (), 1)), CloseDraft(), Fallback(FallbackCause.WITHDRAWN)]
    assert speculation.on_block(block(4, 8), 0.1) == [Dropped(DropCause.OLD_EPOCH)]
    assert proposals(speculation.on_commit(commit(4, 8), 0.2)) == [(5, ())]
    assert speculation.on_commit(commit(5, 8, wants=0), 0.3) == [Emit(commit(5, 8, wants=0))]


def test_n_grams_are_proposed_in_the_call_that_brought_the_commit() -> None:
    speculation = session(Drafter.NGRAM, 2)
    actions = speculation.on_commit(commit(3, 9, 1, 2), 0.0)
    assert actions[:2] == [Propose(DraftBlock("r", 6, (3, 9))), RoundDone(Drafter.NGRAM, 0.0, 0.0, 2)]
    assert proposals(speculation.on_commit(commit(6, 50), 0.0)) == [(7, ())]


def test_a_better_drafter_is_no_fallback() -> None:
    actions = session(Drafter.NGRAM).on_decision(Drafter.MODEL, 4)
    assert [type(action) for action in actions] == [OpenDraft]


def test_the_last_commit_closes_the_draft_first() -> None:
    last = commit(3, 7, finish_reason=FinishReason.LENGTH)
    assert session().on_commit(last, 0.0) == [CloseDraft(), Emit(last)]


def test_commits_are_taken_in_order_whatever_order_they_come_in() -> None:
    speculation = session()
    assert speculation.on_commit(commit(5, 9), 0.0) == []
    assert speculation.on_commit(commit(4, 8), 0.0) == []
    actions = speculation.on_commit(commit(3, 7), 0.0)
    assert [a.commit.token_ids for a in actions if isinstance(a, Emit)] == [(7,), (8,), (9,)]
    assert [a.command for a in actions if isinstance(a, ToDraft)] == [Committed("r", 1, 3, (7, 8, 9), 4)]
    assert speculation.output_token_ids == (7, 8, 9)


def test_a_draft_of_which_nothing_is_wanted_is_left_alone_and_then_told_of_everything_since() -> None:
    speculation = session()
    speculation.on_commit(commit(3, 7), 0.0)
    for base_len in (4, 5, 6):
        silent = commit(base_len, 8, wants=0)
        assert speculation.on_commit(silent, 0.0) == [Emit(silent)]
    actions = speculation.on_commit(commit(7, 9), 0.0)
    assert actions[0] == ToDraft(Committed("r", 1, 4, (8, 8, 8, 9), 4))


def test_a_draft_of_which_nothing_is_wanted_does_not_fall_far_behind() -> None:
    speculation = session()
    told = []
    for base_len in range(3, 103):
        actions = speculation.on_commit(commit(base_len, 8, wants=0), 0.0)
        told += [action.command for action in actions if isinstance(action, ToDraft)]
    assert [(command.base_len, len(command.token_ids), command.draft_len) for command in told] == [
        (3, 32, 0),
        (35, 32, 0),
        (67, 32, 0),
    ]


def test_repeated_commits_are_dropped_and_overlaps_cut() -> None:
    speculation = session()
    speculation.on_commit(commit(3, 7, 8), 0.0)
    assert speculation.on_commit(commit(3, 7, 8), 0.0) == [Dropped(DropCause.REPEATED_COMMIT)]
    logprobs = tuple(TokenLogprobs(token_id, -1.0) for token_id in (8, 9))
    actions = speculation.on_commit(commit(4, 8, 9, logprobs=logprobs), 0.0)
    assert actions[-1] == Emit(commit(5, 9, logprobs=logprobs[1:]))


def test_a_last_commit_without_tokens_ends_the_output() -> None:
    last = commit(3, finish_reason=FinishReason.DEADLINE, wants=0)
    assert session(Drafter.NONE).on_commit(last, 0.0) == [Emit(last)]
