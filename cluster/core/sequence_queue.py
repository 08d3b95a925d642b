"""Sequences in order of priority and arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from cluster.core.sequence import Sequence


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


class SequenceQueue:
    """Owns a set of sequences sorted by (priority, arrival); orders are unique."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence:
        return self._sequences[0]

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Raises KeyError for a sequence that is not in the queue."""
        index = bisect_left(self._sequences, sequence.order, key=_order)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            raise KeyError(sequence.request_id)
        del self._sequences[index]
