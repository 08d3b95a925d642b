"""The histogram's quantiles against sorted values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.log_histogram import HIGHEST, LOWEST, MAX_BUCKETS, RELATIVE_ERROR, LogHistogram

pytestmark = pytest.mark.property

VALUES = st.lists(st.floats(LOWEST, HIGHEST), min_size=1, max_size=200)
SHARES = st.floats(0.0, 1.0)


def histogram(values: list[float]) -> LogHistogram:
    made = LogHistogram()
    for value in values:
        made.add(value)
    return made


@given(VALUES, SHARES)
def test_a_quantile_is_within_the_stated_error(values: list[float], share: float) -> None:
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    found = histogram(values).quantile(share)
    assert found is not None
    assert abs(found / exact - 1) <= RELATIVE_ERROR * 1.0001


@given(VALUES, VALUES, SHARES)
def test_merged_histograms_are_one_of_all_values(one: list[float], other: list[float], share: float) -> None:
    merged = histogram(one)
    merged.merge(histogram(other))
    assert (merged.total, merged.quantile(share)) == (len(one + other), histogram(one + other).quantile(share))


@given(st.lists(st.floats(allow_nan=False), max_size=50))
def test_any_number_is_counted_in_a_bounded_number_of_buckets(values: list[float]) -> None:
    made = histogram(values)
    low, high = made.quantile(0.0), made.quantile(1.0)
    assert (low is None) == (not values)
    if low is not None and high is not None:
        assert LOWEST / 1.03 < low <= high < HIGHEST * 1.03
        assert math.log(high / low) / (2 * math.log1p(RELATIVE_ERROR)) < MAX_BUCKETS
