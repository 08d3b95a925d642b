"""Which waiting sequence starts next, and which running one gives way to others.

Of the lowest priority number, the tenant that has had the fewest tokens comes first, and of its sequences the earliest.
So that nobody waits for ever, every AGING_INTERVAL-th start goes to the sequence that came first of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cluster.core.block_pool import IntegrityError
from cluster.core.sequence import Sequence, SequenceStatus
from cluster.core.sequence_queue import SequenceQueue
from cluster.core.tenant_shares import TenantShares

AGING_INTERVAL = 8  # starts


class WaitingLine:
    """Owns the waiting sequences, one queue per priority and tenant, and the count of starts."""

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self._queues: dict[tuple[int, str], SequenceQueue] = {}
        self._num_starts = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queue in self._queues.values() for sequence in queue)

    @property
    def first(self) -> Sequence:
        """The next one to start. Raises ValueError when nobody waits."""
        is_turn_of_age = self._num_starts % AGING_INTERVAL == AGING_INTERVAL - 1
        return self._earliest() if is_turn_of_age else self._fairest()

    def add(self, sequence: Sequence) -> None:
        """A new sequence, or a preempted one, which is where it was: ahead of its tenant's later ones."""
        tenant = sequence.request.tenant
        if all(tenant != waiting for _, waiting in self._queues):
            self._shares.come_to_wait(tenant)
        self._queues.setdefault(_key(sequence), SequenceQueue()).add(sequence)

    def start(self, sequence: Sequence) -> None:
        """Let it go to run. Its prompt is on its tenant's account, but not a second time after a preemption."""
        sequence.is_aged |= sequence is not self._fairest()
        self._num_starts += 1
        is_new = sequence.status is not SequenceStatus.PREEMPTED
        self._shares.charge(sequence.request.tenant, sequence.num_uncomputed_tokens if is_new else 0)
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Raises KeyError for a sequence that does not wait."""
        queue = self._queues[_key(sequence)]
        queue.remove(sequence)
        if not len(queue):
            del self._queues[_key(sequence)]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every sequence is in the queue of its priority and tenant."""
        for key, queue in self._queues.items():
            if not len(queue) or any(_key(sequence) != key for sequence in queue):
                raise IntegrityError(f"the waiting line of {key} is empty or holds others' sequences")

    def _heads(self) -> Iterator[Sequence]:
        return (queue.first for queue in self._queues.values())

    def _fairest(self) -> Sequence:
        return min(self._heads(), key=lambda sequence: _rank(sequence, self._shares))

    def _earliest(self) -> Sequence:
        return min(self._heads(), key=lambda sequence: sequence.arrival)


def in_order_of_service(sequences: Iterable[Sequence], shares: TenantShares) -> list[Sequence]:
    """Running sequences in the order in which they get rows of a prompt.

    One that was let through for its age goes before all priorities: else it would never come to its end.
    """
    return sorted(sequences, key=lambda sequence: (not sequence.is_aged, *_rank(sequence, shares)))


def in_order_of_keeping(sequences: Iterable[Sequence], shares: TenantShares) -> list[Sequence]:
    """Running sequences, the one that gives way to all others last.

    The order of service, except that the first by age, priority and arrival stands in front. Shares change as tokens
    are computed, and two sequences could take the KV from one another for ever; that one always goes on to its end.
    """
    ordered = in_order_of_service(sequences, shares)
    if ordered:
        safe = min(ordered, key=lambda sequence: (not sequence.is_aged, *_age_rank(sequence)))
        ordered.remove(safe)
        ordered.insert(0, safe)
    return ordered


def _key(sequence: Sequence) -> tuple[int, str]:
    return sequence.request.priority, sequence.request.tenant


def _rank(sequence: Sequence, shares: TenantShares) -> tuple[int, int, int]:
    return sequence.request.priority, shares.served(sequence.request.tenant), sequence.arrival


def _age_rank(sequence: Sequence) -> tuple[int, int]:
    """Of those let through for their age the earliest is first, whatever its priority."""
    return (0 if sequence.is_aged else sequence.request.priority), sequence.arrival
