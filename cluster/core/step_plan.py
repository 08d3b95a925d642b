"""The step being put together: a token budget and the rows that have been given a part of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from cluster.core.kv_cache import KVCacheManager
from cluster.core.sequence import Sequence
from cluster.core.step import ScheduledSequence


@dataclass(slots=True)
class PlannedRows:
    """One sequence's rows: its next `num_tokens` uncomputed tokens, then guesses."""

    sequence: Sequence
    num_tokens: int
    guesses: tuple[int, ...] = ()

    def freeze(self, kv: KVCacheManager) -> ScheduledSequence:
        sequence, num_guesses = self.sequence, len(self.guesses)
        start = sequence.num_computed_tokens
        known_end = start + self.num_tokens
        end = known_end + num_guesses
        return ScheduledSequence(
            request_id=sequence.request_id,
            token_ids=tuple(sequence.token_ids[start:known_end]) + self.guesses,
            start=start,
            block_table=kv.block_table(sequence.request_id)[: kv.num_blocks_for(end)],
            num_samples=num_guesses + 1 if known_end == sequence.num_tokens else 0,
            sampling=sequence.request.sampling,
            num_draft_tokens=num_guesses,
        )


@dataclass(slots=True)
class StepPlan:
    """Owns the budget of one step while it is being planned."""

    num_rows_left: int
    planned: list[PlannedRows] = field(default_factory=list)
    wake_at: float | None = None  # the earliest end of a hold
    has_preempted: bool = False

    def __iter__(self) -> Iterator[PlannedRows]:
        return iter(self.planned)

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self.planned.append(PlannedRows(sequence, num_tokens))
        self.num_rows_left -= num_tokens

    def add_guesses(self, rows: PlannedRows, guesses: tuple[int, ...]) -> None:
        rows.guesses = guesses
        self.num_rows_left -= len(guesses)

    def hold(self, until: float) -> None:
        self.wake_at = until if self.wake_at is None else min(self.wake_at, until)
