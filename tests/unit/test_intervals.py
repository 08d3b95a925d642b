"""Confidence bounds hold as often as they say: enumerated where that is possible."""

from __future__ import annotations

import math

import pytest

from cluster.control.intervals import Interval, difference, quantile_interval, rate_interval, ratio

pytestmark = pytest.mark.unit


def binomial(n: int, p: float) -> list[float]:
    return [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.95, 0.99])
@pytest.mark.parametrize("n", [1, 10, 59, 100, 500])
@pytest.mark.parametrize("alpha", [0.05, 0.001])
def test_a_quantile_is_outside_its_bounds_as_seldom_as_stated_and_no_bound_is_wider_than_needed(
    quantile: float, n: int, alpha: float
) -> None:
    """The chance that just l of n values lie below the quantile is binomial, whatever the distribution."""
    chances = binomial(n, quantile)
    interval = quantile_interval([float(rank) for rank in range(1, n + 1)], quantile, alpha)
    low, high = int(interval.low), n + 1 if interval.high == math.inf else int(interval.high)
    assert sum(chances[:low]) <= alpha, "fewer than `low` values below: the lower bound is above the quantile"
    assert sum(chances[high:]) <= alpha + 1e-12, "`high` values or more below: the upper bound is below it"
    assert sum(chances[: low + 1]) > alpha
    assert high == 1 or sum(chances[high - 1 :]) > alpha


def test_few_values_bound_no_high_quantile_from_above() -> None:
    values = [float(value) for value in range(1, 59)]
    assert quantile_interval(values, 0.95, 0.05).high == math.inf
    assert quantile_interval([*values, 59.0], 0.95, 0.05).high == 59.0


@pytest.mark.parametrize(("canary", "control"), [(100, 100), (200, 1800), (400, 400)])
@pytest.mark.parametrize(("rate", "limit"), [(0.0, 0.01), (0.001, 0.005), (0.01, 0.01), (0.005, 0.02), (0.1, 0.02)])
@pytest.mark.parametrize("alpha", [0.05, 0.005])
def test_a_difference_of_rates_at_its_limit_is_seldom_found_beyond_or_within(
    canary: int, control: int, rate: float, limit: float, alpha: float
) -> None:
    """Summed over all outcomes; the bounds are not exact, and may be wrong 1.3 times as often as they say."""
    canary_intervals = [rate_interval(events, canary, alpha) for events in range(canary + 1)]
    control_intervals = [rate_interval(events, control, alpha) for events in range(control // 2)]
    beyond = within = 0.0
    for own, own_chance in zip(canary_intervals, binomial(canary, rate + limit), strict=True):
        if own_chance < 1e-6:
            continue
        for other, other_chance in zip(control_intervals, _head(control, rate), strict=True):
            if other_chance < 1e-6:
                continue
            found = difference(own, other)
            beyond += own_chance * other_chance * (found.low > limit)
            within += own_chance * other_chance * (found.high <= limit)
    assert beyond <= 1.3 * alpha
    assert within <= 1.3 * alpha


def _head(n: int, p: float) -> list[float]:
    """The chances of fewer than n / 2 events, by logarithms, for large n."""
    if p == 0:
        return [1.0] + [0.0] * (n // 2 - 1)
    logs = (
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(p) + (n - k) * math.log1p(-p)
        for k in range(n // 2)
    )
    return [math.exp(log) for log in logs]


@pytest.mark.parametrize("alpha", [0.05, 0.0001])
def test_a_rate_lies_within_its_bounds_at_the_ends_too(alpha: float) -> None:
    none, all_of_them = rate_interval(0, 10, alpha), rate_interval(10, 10, alpha)
    assert (none.estimate, none.low, all_of_them.estimate, all_of_them.high) == (0.0, 0.0, 1.0, 1.0)
    assert 0 < none.high < 1
    assert all_of_them.low == pytest.approx(1 - none.high)
    assert rate_interval(0, 1, alpha).high <= 1.0


def test_what_a_sample_does_not_bound_is_not_bounded_in_a_comparison() -> None:
    known, unknown, zero = Interval(2.0, 1.0, 4.0), Interval(2.0, 0.0, math.inf), Interval(0.0, 0.0, 0.1)
    assert ratio(known, unknown) == Interval(1.0, 0.0, math.inf)
    assert ratio(unknown, known) == Interval(1.0, 0.0, math.inf)
    assert ratio(known, zero) == Interval(math.inf, 0.0, math.inf)
    assert ratio(zero, known) == ratio(zero, zero) == Interval(0.0, 0.0, math.inf)
    assert difference(known, unknown).low == -math.inf
    assert difference(unknown, known).high == math.inf


def test_equal_intervals_compare_as_equal() -> None:
    one = Interval(2.0, 1.0, 4.0)
    assert ratio(one, one).estimate == 1.0
    assert ratio(one, one).low == pytest.approx(1 / ratio(one, one).high)
    assert difference(one, one) == Interval(0.0, -math.sqrt(5), math.sqrt(5))
