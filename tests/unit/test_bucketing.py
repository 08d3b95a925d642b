"""Buckets: uniform, sticky, and independent from salt to salt."""

from __future__ import annotations

import math

import pytest

from cluster.control.bucketing import NUM_BUCKETS, bucket, in_percent
from tests.policies import policy

pytestmark = pytest.mark.unit

KEYS = [f"user-{i}" for i in range(10_000)]
STEPS = (1.0, 5.0, 25.0, 50.0, 100.0)


def let_in(salt: str, percent: float) -> set[str]:
    return {key for key in KEYS if in_percent(bucket(salt, key), percent)}


def test_a_rollout_lets_in_its_share_of_ten_thousand_keys_and_puts_nobody_out() -> None:
    before: set[str] = set()
    for percent in STEPS:
        now = let_in("v1", percent)
        share = percent / 100
        deviation = math.sqrt(len(KEYS) * share * (1 - share))
        assert abs(len(now) - len(KEYS) * share) <= 4 * deviation
        assert before <= now
        before = now
    assert len(before) == len(KEYS)


def test_another_salt_shuffles_everybody() -> None:
    first, second = let_in("v1", 25), let_in("v2", 25)
    both = len(first & second)  # independent: a quarter of a quarter
    assert abs(both - len(KEYS) / 16) <= 4 * math.sqrt(len(KEYS) * 1 / 16 * 15 / 16)


def test_buckets_are_uniform() -> None:
    counts = [0] * 100
    for key in KEYS:
        counts[bucket("v1", key) * 100 // NUM_BUCKETS] += 1
    chi_square = sum((count - 100) ** 2 / 100 for count in counts)
    assert chi_square < 148.2  # 99 degrees of freedom, 0.1 %


def test_salt_and_key_cannot_run_into_each_other() -> None:
    assert len({bucket("ab", "c"), bucket("a", "bc"), bucket("", "abc"), bucket("abc", "")}) == 4


def test_no_percentage_is_lost_in_floating_point() -> None:
    for hundredths in range(NUM_BUCKETS + 1):
        rule = policy({"action": "allow", "percent": hundredths / 100}).document.rules[0]
        assert rule.basis_points == hundredths
        assert not in_percent(hundredths, hundredths / 100)
        assert hundredths == 0 or in_percent(hundredths - 1, hundredths / 100)
