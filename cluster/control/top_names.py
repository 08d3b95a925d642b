"""Which of many names are told apart: a bounded number of them, the busy ones, and each for good.

Half of the places go to whoever comes first, so that a small system shows everybody at once. The other half go to
names that turn out to have a share of the traffic, however late they come: a flood of names that are seen once each
takes the first half and no more. Who is busy is counted in bounded memory with the Space-Saving algorithm (A. Metwally,
D. Agrawal and A. El Abbadi, ICDT 2005): its counts are at most total / capacity too high, and it knows by how much.
"""

from __future__ import annotations

from typing import Final

OTHER: Final = "other"

_CANDIDATES_PER_PLACE: Final = 4
_MIN_SEEN: Final = 20  # fewer are no share of anything


class TopNames:
    """Owns at most `limit` names; every other one is `other`. A name that has been given is never taken back.

    While there are free places, a name with three quarters of 1 / limit of all that was seen gets one for certain, and
    one with less than half of 1 / limit never does after the first half.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_first = (limit + 1) // 2
        self._known: set[str] = set()
        self._total = 0
        self._candidates: dict[str, tuple[int, int]] = {}  # (count, at most so much of it is others')

    def see(self, name: str) -> str:
        """Count one request of `name`; what it is called from now on."""
        self._total += 1
        if name in self._known:
            return name
        if len(self._known) < self._num_first:
            return self._admit(name)
        if len(self._known) == self._limit:
            return OTHER
        count, excess = self._count(name)
        is_busy = count - excess >= max(_MIN_SEEN, self._total / (2 * self._limit))
        return self._admit(name) if is_busy else OTHER

    def __call__(self, name: str) -> str:
        """What `name` is called, without counting anything."""
        return name if name in self._known else OTHER

    def _admit(self, name: str) -> str:
        self._known.add(name)
        self._candidates.pop(name, None)
        if len(self._known) == self._limit:
            self._candidates.clear()
        return name

    def _count(self, name: str) -> tuple[int, int]:
        candidates = self._candidates
        count, excess = candidates.get(name, (0, 0))
        if not count and len(candidates) == self._limit * _CANDIDATES_PER_PLACE:
            rarest = min(candidates, key=lambda other: candidates[other][0])
            count = excess = candidates.pop(rarest)[0]
        candidates[name] = (count + 1, excess)
        return candidates[name]
