"""What a target replica makes of the draft blocks that reach it: hints, never more."""

from __future__ import annotations

from cluster.core.acceptance import common_prefix_len
from cluster.core.draft_length import DraftLengthController
from cluster.core.hold import HoldPolicy
from cluster.core.sequence import HoldOutcome, RoundTime, Sequence, guesses_left
from cluster.messages.request import MAX_DRAFT_TOKENS
from cluster.messages.rounds import DraftBlock


class Proposals:
    """Owns the rules for taking a block and the count of those that were dropped."""

    def __init__(self, vocab_size: int, hold: HoldPolicy, draft_length: DraftLengthController) -> None:
        self.num_stale = 0
        self._vocab_size = vocab_size
        self._hold = hold
        self._draft_length = draft_length

    def take(self, sequence: Sequence, block: DraftBlock, now: float) -> None:
        """Keep a block whose guesses fit what is committed; count any other. An empty one ends the wait for guesses.

        One that begins with what the sequence's grammar forbids is known to be rejected, and need not be verified.
        """
        if not block.token_ids:
            if block.committed_len == sequence.num_tokens:
                self._hold.block_came(sequence, HoldOutcome.DECLINED)
            return
        if not self._is_well_formed(sequence, block):
            self.num_stale += 1
            return
        sequence.draft_is_late = False
        self._learn(sequence, block, now)
        guesses = guesses_left(block, sequence.token_ids)
        if _is_older(block, sequence.pending) or not guesses:
            self.num_stale += 1
            return
        if sequence.guide is not None and not sequence.guide.legal_prefix(guesses):
            self._draft_length.observe_acceptance(sequence.draft_length, len(guesses), 0)
            self._hold.block_came(sequence, HoldOutcome.DECLINED)  # as good as none
            return
        self._hold.block_came(sequence, HoldOutcome.ARRIVED)
        sequence.pending = block

    def set_limit(self, sequence: Sequence, max_draft_tokens: int) -> None:
        """How many guesses may be asked for from now on; with 0, none is waited for or verified any more."""
        if max_draft_tokens == 0:
            self._hold.block_came(sequence, HoldOutcome.DECLINED)
        self._draft_length.set_limit(sequence.draft_length, max_draft_tokens)

    def drop_if_stale(self, sequence: Sequence, was_verified: bool) -> None:
        """After a commit: keep what is left of the pending block if the committed tokens are the ones it guessed."""
        if sequence.pending is not None and not guesses_left(sequence.pending, sequence.token_ids):
            sequence.pending = None
            self.num_stale += not was_verified

    def _is_well_formed(self, sequence: Sequence, block: DraftBlock) -> bool:
        return (
            sequence.speculates
            and block.committed_len > 0
            and len(block.token_ids) <= MAX_DRAFT_TOKENS
            and all(0 <= token_id < self._vocab_size for token_id in block.token_ids)
        )

    def _learn(self, sequence: Sequence, block: DraftBlock, now: float) -> None:
        """How long it took; and if the sequence went on without it, how much of it was right anyway."""
        asked_at = sequence.asked_at.pop(block.committed_len, None)
        if asked_at is None:
            return
        state, num_guesses = sequence.draft_length, len(block.token_ids)
        sequence.round_time = RoundTime(now - asked_at, block.draft_time_s)
        self._draft_length.observe_arrival(state, num_guesses, block.draft_time_s, now - asked_at)
        missed = sequence.token_ids[block.committed_len : block.committed_len + num_guesses]
        if missed:
            num_right = common_prefix_len(block.token_ids, missed)
            self._draft_length.observe_acceptance(state, len(missed), num_right)


def _is_older(block: DraftBlock, pending: DraftBlock | None) -> bool:
    """Conditioned on less than what is pending; both fit, so the newer one knows better."""
    return pending is not None and (block.committed_len, block.epoch) < (pending.committed_len, pending.epoch)
