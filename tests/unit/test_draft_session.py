import math

import pytest

from cluster.core.draft_session import CommitOutcome, DraftSession
from cluster.core.step import SampledTokens
from cluster.messages.answer import TokenLogprobs
from cluster.messages.request import MAX_DRAFT_TOKENS
from cluster.messages.rounds import Committed, Open
from tests.fakes import sampling

pytestmark = pytest.mark.unit

EOS = 99


def session(*token_ids: int, draft_len: int = 3, max_len: int = 100, **fields: object) -> DraftSession:
    message = Open("r", 0, token_ids, sampling(**fields), draft_len)
    return DraftSession(message, max_len, frozenset({EOS}), now=0.0)


def draft(one: DraftSession, *guesses: int) -> None:
    """Run rows and add guesses, as one step per guess would."""
    for guess in guesses:
        one.advance(one.num_pending_tokens)
        one.add_guess(guess)


def committed(base_len: int, *token_ids: int, draft_len: int = 3, epoch: int = 0) -> Committed:
    return Committed("r", epoch, base_len, token_ids, draft_len)


def test_a_new_session_has_its_whole_prompt_to_read():
    one = session(1, 2, 3)
    assert one.pending_rows(10) == (1, 2, 3)
    assert one.wants_guess


def test_a_block_is_due_after_as_many_guesses_as_were_asked_for():
    one = session(1, 2, draft_len=2)
    draft(one, 5)
    assert not one.is_due
    draft(one, 6)
    assert one.is_due
    block = one.take_block(now=4.0)
    assert (block.committed_len, block.token_ids, block.draft_time_s) == (2, (5, 6), 4.0)
    assert not one.is_due


def test_the_last_guess_has_no_kv_and_is_ingested_after_a_full_acceptance():
    one = session(1, 2, draft_len=2)
    draft(one, 5, 6)
    one.take_block(0.0)
    one.commit(committed(2, 5, 6, 7), 1.0)
    assert one.pending_rows(10) == (6, 7)
    assert one.num_computed_tokens == 3


def test_a_wrong_guess_is_forgotten_with_all_that_followed_it():
    one = session(1, 2, draft_len=3)
    draft(one, 5, 6, 7)
    one.take_block(0.0)
    one.commit(committed(2, 5, 8), 1.0)
    assert one.guesses == []
    assert one.num_computed_tokens == 3  # 1, 2 and the right guess 5
    assert one.pending_rows(10) == (8,)


def test_guesses_beyond_what_was_committed_stay_valid():
    one = session(1, 2, draft_len=3)
    draft(one, 5, 6, 7)
    one.take_block(0.0)
    one.commit(committed(2, 5, draft_len=2), 1.0)
    assert one.is_due
    assert one.take_block(1.0).token_ids == (6, 7)


def test_a_guess_more_is_added_to_those_that_stay_valid():
    one = session(1, 2, draft_len=2)
    draft(one, 5, 6)
    one.take_block(0.0)
    one.commit(committed(2, 5, draft_len=2), 1.0)
    assert one.pending_rows(10) == (6,)
    draft(one, 9)
    assert one.take_block(1.0).token_ids == (6, 9)


def test_keeping_up_reads_all_but_the_last_token():
    one = session(1, 2, 3, draft_len=0)
    assert one.pending_rows(10) == (1, 2)
    assert not one.wants_guess
    one.advance(2)
    assert one.num_pending_tokens == 0
    one.commit(committed(3, draft_len=1), 1.0)
    assert one.pending_rows(10) == (3,)


@pytest.mark.parametrize("message", [committed(1, 2), committed(2, 3, epoch=-1)], ids=["older length", "older epoch"])
def test_a_stale_commit_changes_nothing(message):
    one = session(1, 2)
    assert one.commit(message, 1.0) is CommitOutcome.STALE
    assert (one.token_ids, one.last_used) == ([1, 2], 0.0)


@pytest.mark.parametrize("message", [committed(3, 4), committed(2, 3, epoch=1)], ids=["newer length", "newer epoch"])
def test_a_commit_that_does_not_join_on_is_a_gap(message):
    one = session(1, 2)
    assert one.commit(message, 1.0) is CommitOutcome.GAP
    assert one.token_ids == [1, 2]


def test_drafting_ends_at_a_stop_token():
    one = session(1, draft_len=5)
    draft(one, 4, EOS)
    assert one.take_block(0.0).token_ids == (4, EOS)


def test_a_chain_of_guesses_has_kv_up_to_the_last_but_one():
    one = session(1, 2, draft_len=4)
    one.advance(one.num_pending_tokens)
    one.add_guesses(SampledTokens((5, 6, 7)))
    assert (one.guesses, one.num_computed_tokens, one.pending_rows(9)) == ([5, 6, 7], 4, (7,))


def test_what_a_chain_made_after_a_stop_token_is_forgotten():
    one = session(1, 2, draft_len=4)
    one.advance(one.num_pending_tokens)
    one.add_guesses(SampledTokens((5, EOS, 7, 8)))
    assert (one.guesses, one.num_computed_tokens, one.is_due) == ([5, EOS], 3, True)


def unsure(one: DraftSession, *chances: tuple[int, float]) -> None:
    """Run pending rows and a chain of guesses with these chances."""
    one.advance(one.num_pending_tokens)
    token_ids = tuple(token_id for token_id, _ in chances)
    one.add_guesses(SampledTokens(token_ids, tuple(TokenLogprobs(t, math.log(chance)) for t, chance in chances)))


def asking(*token_ids: int, min_confidence: float = 0.3) -> DraftSession:
    one = session(1, draft_len=0, temperature=0)
    one.commit(Committed("r", 0, 1, token_ids, 5, min_confidence), 0.0)
    return one


def test_a_block_ends_with_the_guess_that_makes_it_probably_wrong():
    one = asking(2)
    assert one.sampling.num_logprobs == 0
    assert one.min_logprob == math.log(0.3)
    unsure(one, (5, 0.9), (6, 0.8))
    assert not one.is_due
    assert one.min_logprob == pytest.approx(math.log(0.3 / (0.9 * 0.8)))
    unsure(one, (7, 0.4), (8, 0.9))
    assert one.is_due
    assert one.take_block(0.0).token_ids == (5, 6, 7), "what a chain made after it is forgotten"


def test_guesses_that_come_true_no_longer_make_a_block_unsure():
    one = asking(2)
    unsure(one, (5, 0.2))
    assert one.take_block(0.0).token_ids == (5,)
    one.commit(Committed("r", 0, 2, (5,), 5, 0.3), 0.0)
    assert one.wants_guess
    unsure(one, (6, 0.9), (7, 0.3))
    assert one.take_block(0.0).token_ids == (6, 7)
    one.commit(Committed("r", 0, 3, (6,), 5, 0.3), 0.0)
    assert one.wants_guess, "what is left has a chance of 0.3"
    one.commit(Committed("r", 0, 4, (), 5, 0.31), 0.0)
    assert one.is_due, "and now more is asked"


def test_a_block_that_ends_where_it_is_unsure_may_be_longer() -> None:
    one = session(1, draft_len=0, temperature=0)
    one.commit(Committed("r", 0, 1, (2,), 1, 0.3, 3), 0.0)
    unsure(one, (5, 0.9))
    assert one.wants_guess
    unsure(one, (6, 0.9), (7, 0.9))
    assert one.take_block(0.0).token_ids == (5, 6, 7)


@pytest.mark.parametrize(("draft_len", "min_confidence", "expected"), [(1, 0.0, 1), (0, 0.3, None)])
def test_a_longer_block_needs_a_threshold_and_a_block_that_is_asked_for(draft_len, min_confidence, expected) -> None:
    one = session(1, draft_len=0, temperature=0)
    one.commit(Committed("r", 0, 1, (2,), draft_len, min_confidence, 3), 0.0)
    assert one.num_owed == expected


def test_no_chances_are_worked_out_where_none_are_asked_for():
    one = asking(2, min_confidence=0.0)
    assert (one.sampling.num_logprobs, one.min_logprob) == (None, -math.inf)
    unsure(one, (5, 0.01), (6, 0.01))
    assert not one.is_due


def test_drafting_goes_on_after_eos_when_it_is_ignored():
    one = session(1, draft_len=2, ignore_eos=True)
    draft(one, EOS)
    assert not one.is_due


def test_the_model_length_bounds_guesses():
    one = session(1, 2, 3, draft_len=5, max_len=4)
    draft(one, 8)
    assert one.take_block(0.0).token_ids == (8,)


def test_a_full_session_is_due_with_an_empty_block():
    assert session(1, 2, draft_len=5, max_len=2).take_block(0.0).token_ids == ()


def test_the_draft_length_is_bounded():
    assert session(1, draft_len=1000).num_owed == MAX_DRAFT_TOKENS


def test_guesses_are_sampled_without_log_probabilities():
    assert session(1, num_logprobs=5).sampling.num_logprobs is None
