"""Confidence bounds without assumptions about the shape of latencies. Every bound here is one-sided.

- A quantile lies above the order statistic l and below u except with the stated chance, for any distribution: how many
  of n values lie below the quantile q is binomial (n, q). See H. A. David and H. N. Nagaraja, Order Statistics, §7.1.
- A rate has the score interval (E. B. Wilson, JASA 22 (1927) 209-212), corrected for continuity.
- Two intervals combine into one for their difference by the squared distances from the estimates to the bounds, which
  holds where these are about normal (MOVER): G. Y. Zou and A. Donner, Statistics in Medicine 27 (2008) 1693-1702; for
  two Wilson intervals it is R. G. Newcombe's method 11, Statistics in Medicine 17 (1998) 873-890. A ratio is a
  difference of logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with a lower and an upper bound; infinite (or 0, below) where the sample says nothing."""

    estimate: float
    low: float
    high: float


def quantile_interval(values: Sequence[float], quantile: float, alpha: float) -> Interval:
    """Of the distribution that the values, at least one and not negative, are drawn from.

    Each bound is wrong with a chance of at most alpha. A bound that n values cannot give is 0 or infinite.
    """
    ordered = sorted(values)
    n = len(ordered)
    low = _lower_rank(n, quantile, alpha)
    high = n + 1 - _lower_rank(n, 1.0 - quantile, alpha)
    estimate = ordered[min(max(math.ceil(n * quantile), 1), n) - 1]
    return Interval(estimate, ordered[low - 1] if low else 0.0, ordered[high - 1] if high <= n else math.inf)


def rate_interval(events: int, trials: int, alpha: float) -> Interval:
    """Of the chance of an event, from at least one trial; each bound is wrong with a chance of about alpha.

    With the correction for continuity, which keeps rare events from looking certain.
    """
    z = NormalDist().inv_cdf(1.0 - alpha)
    rate = events / trials
    low = 1.0 - _upper_rate(trials - events, trials, z) if events else 0.0
    high = _upper_rate(events, trials, z) if events < trials else 1.0
    return Interval(rate, min(max(low, 0.0), rate), max(min(high, 1.0), rate))


def _upper_rate(events: int, trials: int, z: float) -> float:
    rate = events / trials
    root = z * z + 2.0 - 1.0 / trials + 4.0 * rate * (trials * (1.0 - rate) - 1.0)
    return (2.0 * events + z * z + 1.0 + z * math.sqrt(max(root, 0.0))) / (2.0 * (trials + z * z))


def difference(a: Interval, b: Interval) -> Interval:
    """Of a - b, for independent samples."""
    estimate = a.estimate - b.estimate
    return Interval(
        estimate,
        estimate - math.hypot(a.estimate - a.low, b.high - b.estimate),
        estimate + math.hypot(a.high - a.estimate, b.estimate - b.low),
    )


def ratio(a: Interval, b: Interval) -> Interval:
    """Of a / b, for independent samples of values that are not negative. Without events in b it has no upper bound."""
    if not b.estimate or not a.estimate:
        return Interval(math.inf if a.estimate else 0.0, 0.0, math.inf)
    logs = difference(_logs(a), _logs(b))
    return Interval(a.estimate / b.estimate, math.exp(logs.low), math.exp(logs.high) if logs.high < 700 else math.inf)


def _logs(interval: Interval) -> Interval:
    low = math.log(interval.low) if interval.low else -math.inf
    return Interval(math.log(interval.estimate), low, math.log(interval.high))


@lru_cache(maxsize=4096)
def _lower_rank(n: int, quantile: float, alpha: float) -> int:
    """The largest l for which at most l - 1 of n values lie below the quantile with a chance of at most alpha; or 0."""
    chance = 0.0
    for below in range(n):
        chance += math.exp(_log_binomial(n, below, quantile))
        if chance > alpha:
            return below
    return n


def _log_binomial(n: int, k: int, p: float) -> float:
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return ways + k * math.log(p) + (n - k) * math.log1p(-p)
