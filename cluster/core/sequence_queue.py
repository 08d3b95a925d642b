"""Sequences in the order in which they are served."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from cluster.core.block_pool import IntegrityError
from cluster.core.sequence import Sequence, SequenceStatus


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

    @property
    def last(self) -> Sequence:
        return self._sequences[-1]

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Raises KeyError for a sequence that is not in the queue."""
        index = bisect_left(self._sequences, sequence.order, key=_order)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            raise KeyError(sequence.request_id)
        del self._sequences[index]


def check_queues(sequences: Mapping[str, Sequence], waiting: SequenceQueue, running: SequenceQueue) -> None:
    """Raise IntegrityError unless every sequence is in the one queue that its status names, and in order."""
    for queue in (waiting, running):
        orders = [sequence.order for sequence in queue]
        if orders != sorted(set(orders)):
            raise IntegrityError(f"a queue is out of order: {orders}")
        for sequence in queue:
            if sequences.get(sequence.request_id) is not sequence:
                raise IntegrityError(f"{sequence.request_id} is queued but unknown")
            if (queue is running) != (sequence.status is SequenceStatus.RUNNING):
                raise IntegrityError(f"{sequence.request_id} is {sequence.status.value} but in the other queue")
    if len(waiting) + len(running) != len(sequences):
        raise IntegrityError("a sequence is in no queue, or in two")
