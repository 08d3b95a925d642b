"""Quantiles of many positive values in little memory, within a stated error. Pure.

Values are counted in buckets whose bounds grow by a constant ratio, so a quantile is off by at most half a bucket's
width, in proportion. (The idea is that of HDR histograms and of Masson, Rim and Lee, "DDSketch", VLDB 2019.)
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

LOWEST: Final = 1e-6  # smaller values count as this one
HIGHEST: Final = 1e5  # larger ones as this one
RELATIVE_ERROR: Final = 0.01
_LOG_RATIO: Final = 2 * math.log1p(RELATIVE_ERROR)  # of a bucket's upper to its lower bound
MAX_BUCKETS: Final = math.ceil(math.log(HIGHEST / LOWEST) / _LOG_RATIO) + 1


class LogHistogram:
    """Owns the counts of a set of values; at most MAX_BUCKETS of them, however many values there are."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.total = 0

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[math.floor(math.log(min(max(value, LOWEST), HIGHEST)) / _LOG_RATIO)] += 1
        self.total += 1

    def merge(self, other: LogHistogram) -> None:
        """Count everything that `other` has counted."""
        self._counts.update(other._counts)
        self.total += other.total

    def quantile(self, share: float) -> float | None:
        """The smallest value with at least that share of all values at or below it, within RELATIVE_ERROR.

        None without any value.
        """
        if not self.total:
            return None
        wanted, seen = max(1, math.ceil(share * self.total)), 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= wanted:
                return math.exp((bucket + 0.5) * _LOG_RATIO)
        raise AssertionError("the counts do not add up")
