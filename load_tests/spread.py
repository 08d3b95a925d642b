"""A figure over prompts, rounds or runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and deciles."""

    p10: float
    median: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        cuts = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
        return cls(cuts[0], statistics.median(values), cuts[8])

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.p10:.3f}, {self.p90:.3f}]"
