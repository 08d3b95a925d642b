"""Finished requests of the last minute, ten minutes and hour, by any of their dimensions, in bounded memory. Pure.

Each window is a ring of slices of time, and each slice has a cell for each combination of values that it has seen. A
slice that has many cells tells new combinations apart in fewer dimensions; every request is counted in each window in
exactly one cell, whatever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from cluster.control.cell import Cell
from cluster.control.dimensions import Dimension, Key, Naming, coarser
from cluster.control.finished_request import FinishedRequest

# With so many cells in a slice, a new combination keeps only these dimensions.
COARSENING: Final = (
    (384, frozenset(Dimension)),
    (511, frozenset({Dimension.MODEL, Dimension.TENANT, Dimension.VARIANT, Dimension.DRAFTER})),
)
MAX_CELLS: Final = COARSENING[-1][0] + 1  # per slice: the last one takes what finds no place


class Window(Enum):
    """How far back a report looks: slices of so many seconds, and how many of them beside the present one."""

    MINUTE = ("1m", 10, 6)
    TEN_MINUTES = ("10m", 60, 10)
    HOUR = ("1h", 300, 12)

    def __init__(self, label: str, slice_s: int, num_slices: int) -> None:
        self.label = label
        self.slice_s = slice_s
        self.num_slices = num_slices


@dataclass(slots=True)
class Group:
    """Requests that have the same values in the dimensions asked for.

    speculating: those of them whose guesses were verified. models: those that they were for.
    """

    all: Cell = field(default_factory=Cell)
    speculating: Cell = field(default_factory=Cell)
    models: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Selection:
    """What a window holds, by the dimensions asked for. Times in seconds since 1970."""

    started_at: float
    ended_at: float
    groups: dict[tuple[str, ...], Group]
    plain: dict[str, Cell]  # requests that had no guesses, by model: what speculation is compared with


class _Slice:
    """Owns the cells of one slice of time."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, ...], tuple[Key, Cell]] = {}

    def add(self, key: Key, request: FinishedRequest) -> None:
        self._cell(key).add(request)

    def cells(self) -> Iterator[tuple[Key, Cell]]:
        return iter(self._cells.values())

    def _cell(self, key: Key) -> Cell:
        for limit, kept in COARSENING:
            key = coarser(key, kept)
            if (values := tuple(key.values())) in self._cells or len(self._cells) < limit:
                return self._cells.setdefault(values, (key, Cell()))[1]
        key = coarser(key, frozenset())
        return self._cells.setdefault(tuple(key.values()), (key, Cell()))[1]


class _Ring:
    """Owns the slices of one window."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._slices: dict[int, _Slice] = {}

    def add(self, key: Key, request: FinishedRequest, now: float) -> None:
        number = int(min(request.finished_at, now) // self._window.slice_s)
        if number < self._first(now):
            return
        if number not in self._slices:
            self._slices = {n: kept for n, kept in self._slices.items() if n >= self._first(now)} | {number: _Slice()}
        self._slices[number].add(key, request)

    def started_at(self, now: float) -> float:
        return float(self._first(now) * self._window.slice_s)

    def cells(self, now: float) -> Iterator[tuple[Key, Cell]]:
        first = self._first(now)
        return (cell for number, kept in self._slices.items() if number >= first for cell in kept.cells())

    def _first(self, now: float) -> int:
        return int(now // self._window.slice_s) - self._window.num_slices


class Breakdown:
    """Owns what has been reported. `clock` is seconds since 1970, as in the requests."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._naming = Naming()
        self._rings = {window: _Ring(window) for window in Window}

    def add(self, requests: Iterable[FinishedRequest]) -> None:
        """Count requests; those that ended before a window began are not in it."""
        now = self._clock()
        for request in requests:
            key = self._naming.see(request)
            for ring in self._rings.values():
                ring.add(key, request, now)

    def select(self, window: Window, by: tuple[Dimension, ...]) -> Selection:
        """Merge what a window holds into one group for each combination of values of `by`."""
        now, ring = self._clock(), self._rings[window]
        groups: dict[tuple[str, ...], Group] = {}
        plain: dict[str, Cell] = {}
        for key, cell in ring.cells(now):
            group = groups.setdefault(tuple(key[dimension] for dimension in by), Group())
            group.all.merge(cell)
            group.models.add(key[Dimension.MODEL])
            side = group.speculating if cell.num_verifications else plain.setdefault(key[Dimension.MODEL], Cell())
            side.merge(cell)
        return Selection(ring.started_at(now), now, groups, plain)
