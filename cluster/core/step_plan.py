"""The step being put together: a token budget and the rows that have been given a part of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.core.kv_cache import KVCacheManager
from cluster.core.prefill_budget import PromptAllowance
from cluster.core.sequence import Sequence
from cluster.core.step import ScheduledSequence, SchedulerOutput


@dataclass(slots=True)
class PlannedRows:
    """One sequence's rows: its next `num_tokens` uncomputed tokens, then guesses."""

    sequence: Sequence
    num_tokens: int
    guesses: tuple[int, ...] = ()


class StepPlan:
    """Owns the budget of one step while it is being planned: decode rows first, then guesses, then prefill."""

    def __init__(self, num_rows: int, kv: KVCacheManager) -> None:
        self.num_rows_left = num_rows
        self._num_rows = num_rows
        self._kv = kv
        self._planned: list[PlannedRows] = []

    @property
    def num_planned_rows(self) -> int:
        return self._num_rows - self.num_rows_left

    def add_decode(self, sequence: Sequence) -> None:
        self._planned.append(PlannedRows(sequence, 1))
        self.num_rows_left -= 1

    def add_guesses(self, num_rows: int) -> None:
        """Give the decode rows' guesses equal shares of `num_rows`; what one does not use goes to the next.

        Short of KV, guesses are left out.
        """
        guessing = [(rows, guesses) for rows in self._planned if (guesses := rows.sequence.guesses())]
        for index, (rows, guesses) in enumerate(guessing):
            guesses = guesses[: num_rows // (len(guessing) - index)]
            num_tokens = rows.sequence.num_tokens
            while guesses and not self._kv.allocate_slots(rows.sequence.request_id, num_tokens + len(guesses)):
                guesses = guesses[:-1]
            rows.guesses = guesses
            num_rows -= len(guesses)
            self.num_rows_left -= len(guesses)

    def add_prefills(self, sequences: Iterable[Sequence], allowance: PromptAllowance) -> None:
        """Give rows to prompts, in order, as much as each can use of what is left and allowed.

        The first leaves up to half to shorter ones of its own tenant and priority: a long prompt takes at most twice
        as long for it, and a short one that comes after it need not wait for its end.
        """
        ordered = list(sequences)
        if not ordered:
            return
        first, *others = ordered
        overtaking: list[Sequence] = []
        later: list[Sequence] = []
        for other in others:
            (overtaking if _may_overtake(other, first) else later).append(other)
        overtaking.sort(key=lambda other: other.num_uncomputed_tokens)
        num_wanted = sum(other.num_uncomputed_tokens for other in overtaking)
        num_rows = max(self.num_rows_left - num_wanted, -(-self.num_rows_left // 2))
        self._add_prefill(first, allowance, num_rows, share=0.5 if overtaking else 1.0)
        for sequence in (*overtaking, *later):
            if not self.num_rows_left:
                return
            self._add_prefill(sequence, allowance, self.num_rows_left)

    def _add_prefill(self, sequence: Sequence, allowance: PromptAllowance, num_rows: int, share: float = 1.0) -> None:
        num_wanted = min(num_rows, sequence.num_uncomputed_tokens)
        num_tokens = allowance.take(sequence.num_computed_tokens, num_wanted, share)
        if num_tokens:
            self._planned.append(PlannedRows(sequence, num_tokens))
            self.num_rows_left -= num_tokens

    def freeze(self, now: float, wake_at: float | None) -> SchedulerOutput:
        """The step as a runner gets it; its sequences are in it from `now` on."""
        for rows in self._planned:
            rows.sequence.enter_step(now)
        return SchedulerOutput(tuple(self._freeze(rows) for rows in self._planned), wake_at)

    def _freeze(self, rows: PlannedRows) -> ScheduledSequence:
        sequence, num_guesses = rows.sequence, len(rows.guesses)
        start = sequence.num_computed_tokens
        known_end = start + rows.num_tokens
        num_samples = num_guesses + 1 if known_end == sequence.num_tokens else 0
        history = sequence.history if num_samples else None
        guide = sequence.guide if num_samples else None
        return ScheduledSequence(
            request_id=sequence.request_id,
            token_ids=tuple(sequence.token_ids[start:known_end]) + rows.guesses,
            start=start,
            block_table=self._kv.block_table(sequence.request_id)[: self._kv.num_blocks_for(known_end + num_guesses)],
            num_samples=num_samples,
            sampling=sequence.request.sampling,
            num_draft_tokens=num_guesses,
            history=None if history is None else history.snapshot(rows.guesses),
            token_masks=None if guide is None else guide.masks(rows.guesses),
        )


def _may_overtake(sequence: Sequence, first: Sequence) -> bool:
    """Whether a prompt may have rows of the first one's: not of another tenant's, nor of a more important one."""
    return (
        sequence.request.tenant == first.request.tenant
        and sequence.request.priority == first.request.priority
        and sequence.num_uncomputed_tokens < first.num_uncomputed_tokens
    )
