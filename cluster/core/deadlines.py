"""When requests must be over."""

from __future__ import annotations

import heapq

from cluster.core.sequence import Sequence


class Deadlines:
    """Owns the deadlines of sequences, earliest first. Ended sequences stay until their time comes: drop them then."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, tuple[int, int], str]] = []

    @property
    def earliest(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def add(self, sequence: Sequence, deadline: float) -> None:
        heapq.heappush(self._heap, (deadline, sequence.order, sequence.request_id))

    def take_expired(self, sequences: dict[str, Sequence], now: float) -> list[Sequence]:
        """Those of `sequences` whose deadline has passed; each is reported once."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            _, order, request_id = heapq.heappop(self._heap)
            sequence = sequences.get(request_id)
            if sequence is not None and sequence.order == order:  # else it ended, and its id may be in use again
                expired.append(sequence)
        return expired
