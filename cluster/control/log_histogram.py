"""Quantiles of many times in little memory, within a stated error. Pure.

Times, in seconds, are counted in buckets whose bounds grow by a constant ratio, so a quantile is off by at most half a
bucket's width, in proportion. Merging adds counts, so its order does not matter. (The idea is that of HDR histograms
and of Masson, Rim and Lee, "DDSketch", VLDB 2019.)
"""

from __future__ import annotations

import math
from array import array
from operator import add
from typing import Final

LOWEST: Final = 1e-4  # shorter times count as this one
HIGHEST: Final = 1e3  # longer ones as this one
RELATIVE_ERROR: Final = 0.02
_LOG_RATIO: Final = 2 * math.log1p(RELATIVE_ERROR)  # of a bucket's upper to its lower bound
MAX_BUCKETS: Final = math.ceil(math.log(HIGHEST / LOWEST) / _LOG_RATIO) + 1
MAX_BYTES: Final = 4 * MAX_BUCKETS


class LogHistogram:
    """Owns the counts of a set of times: MAX_BYTES, however many there are, and none before the first."""

    __slots__ = ("_counts", "total")

    def __init__(self) -> None:
        self._counts = array("I")
        self.total = 0

    def add(self, value: float) -> None:
        """Count one time."""
        self._make_room()
        self._counts[math.floor(math.log(min(max(value, LOWEST), HIGHEST) / LOWEST) / _LOG_RATIO)] += 1
        self.total += 1

    def merge(self, other: LogHistogram) -> None:
        """Count everything that `other` has counted."""
        if not other.total:
            return
        self._counts = array("I", map(add, self._counts, other._counts)) if self.total else array("I", other._counts)
        self.total += other.total

    def quantile(self, share: float) -> float | None:
        """The smallest value with at least that share of all values at or below it, within RELATIVE_ERROR.

        None without any value.
        """
        if not self.total:
            return None
        wanted, seen = max(1, math.ceil(share * self.total)), 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if seen >= wanted:
                return LOWEST * math.exp((bucket + 0.5) * _LOG_RATIO)
        raise AssertionError("the counts do not add up")

    def _make_room(self) -> None:
        if not self._counts:
            self._counts = array("I", bytes(MAX_BYTES))
