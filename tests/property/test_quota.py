"""A tenant never gets more than its quota, and always gets it back."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cluster.control.quota import Quota, Quotas

pytestmark = pytest.mark.property

gaps = st.lists(st.floats(0, 30), min_size=1, max_size=60)


@given(gaps, st.integers(1, 120))
def test_no_window_of_any_length_lets_in_more_than_a_burst_and_its_share_of_the_rate(
    gaps: list[float], per_minute: int
) -> None:
    quotas = Quotas(lambda _: Quota(requests_per_minute=per_minute))
    now, admitted = 100.0, []
    for gap in gaps:
        now += gap
        if quotas.admit("a", 1, now) is None:
            admitted.append(now)
            quotas.release("a")
    for first, start in enumerate(admitted):
        for last in range(first, len(admitted)):
            allowed = per_minute * (1 + (admitted[last] - start) / 60)
            assert last - first + 1 <= allowed + 1e-6


@given(st.floats(0.2, 600), st.integers(0, 200))
def test_a_refused_request_gets_in_after_the_wait_it_was_told(per_minute: float, spent: int) -> None:
    quotas = Quotas(lambda _: Quota(requests_per_minute=per_minute))
    now = 0.0
    for _ in range(spent):
        quotas.admit("a", 1, now)
    refused = quotas.admit("a", 1, now)
    if refused is not None:
        assert quotas.admit("a", 1, now + refused.retry_after_s * 0.9) is not None
        assert quotas.admit("a", 1, now + refused.retry_after_s + 1e-6) is None


@given(st.integers(1, 10_000), st.integers(0, 50_000))
def test_output_is_paid_for_after_the_fact(per_minute: int, produced: int) -> None:
    quotas = Quotas(lambda _: Quota(tokens_per_minute=per_minute))
    assert quotas.admit("a", 0, 0.0) is None
    quotas.charge("a", produced, 0.0)
    refused = quotas.admit("a", 0, 0.0)
    assert (refused is None) == (produced < per_minute)
    if refused is not None:
        assert refused.limit == "tokens_per_minute"
        assert quotas.admit("a", 0, refused.retry_after_s + 1e-6) is None


def test_concurrency_is_counted_per_tenant() -> None:
    quotas = Quotas(lambda tenant: Quota(max_concurrent=2) if tenant == "a" else Quota())
    assert quotas.admit("a", 1, 0.0) is None
    assert quotas.admit("a", 1, 0.0) is None
    refused = quotas.admit("a", 1, 0.0)
    assert refused is not None
    assert refused.limit == "max_concurrent"
    assert quotas.admit("b", 1, 0.0) is None
    quotas.release("a")
    assert quotas.admit("a", 1, 0.0) is None


def test_a_refused_request_costs_nothing() -> None:
    quotas = Quotas(lambda _: Quota(requests_per_minute=60, max_concurrent=1))
    assert quotas.admit("a", 1, 0.0) is None
    for _ in range(100):
        assert quotas.admit("a", 1, 0.0) is not None
    quotas.release("a")
    assert quotas.admit("a", 1, 0.0) is None


def test_tenants_are_forgotten_once_they_have_their_whole_quota_again() -> None:
    quotas = Quotas(lambda _: Quota(requests_per_minute=10, tokens_per_minute=100))
    for number in range(10_000):
        assert quotas.admit(f"tenant-{number}", 5, number * 1.0) is None
        quotas.release(f"tenant-{number}")
    assert quotas.num_tenants < 400


def test_a_new_limit_holds_at_once() -> None:
    limits = {"a": Quota()}
    quotas = Quotas(limits.__getitem__)
    for _ in range(5):
        assert quotas.admit("a", 1, 0.0) is None
    limits["a"] = Quota(max_concurrent=3)
    assert quotas.admit("a", 1, 0.0) is not None


def test_a_limit_that_is_new_starts_with_a_whole_minute() -> None:
    limits = {"a": Quota()}
    quotas = Quotas(limits.__getitem__)
    for _ in range(100):
        assert quotas.admit("a", 50, 0.0) is None
        quotas.release("a")
    limits["a"] = Quota(requests_per_minute=3, tokens_per_minute=100)
    assert [quotas.admit("a", 1, 0.0) is None for _ in range(4)] == [True, True, True, False]


@given(st.floats(0.01, 1e6), st.floats(0.01, 1e6), st.integers(0, 200))
def test_a_raised_limit_leaves_the_amount_that_is_used_and_a_lowered_one_the_share(
    old: float, new: float, spent: int
) -> None:
    limits = {"a": Quota(tokens_per_minute=old)}
    quotas = Quotas(limits.__getitem__)
    quotas.admit("a", spent, 0.0)
    limits["a"] = Quota(tokens_per_minute=new)
    used = spent if new > old else spent * new / old
    left = max(1.0, new) - used
    assume(abs(left) > 1e-4 * new)
    assert (quotas.admit("a", 0, 0.0) is None) == (left > 0)


def test_whoever_is_far_over_a_limit_gets_in_when_it_is_raised() -> None:
    limits = {"a": Quota(tokens_per_minute=10)}
    quotas = Quotas(limits.__getitem__)
    assert quotas.admit("a", 10_000, 0.0) is None
    refused = quotas.admit("a", 1, 0.0)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(59_946)  # 9991 tokens at 10 a minute
    limits["a"] = Quota(tokens_per_minute=20_000)
    assert quotas.admit("a", 1, 0.0) is None


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 8))
def test_requests_that_come_together_are_let_in_together_or_refused_together(
    num_requests: int, limit: int, num_before: int
) -> None:
    for quota in (Quota(requests_per_minute=limit), Quota(max_concurrent=limit)):
        quotas = Quotas(lambda _, quota=quota: quota)  # type: ignore[misc]
        for _ in range(min(num_before, limit)):
            assert quotas.admit("a", 0, 0.0) is None
        refused = quotas.exceeded_by("a", num_requests, 0.0)
        let_in = [quotas.admit("a", 0, 0.0) is None for _ in range(num_requests)]
        assert (refused is None) == all(let_in)
        assert refused is None or (refused.retry_after_s is None) == (num_requests > limit)


def test_routers_share_a_quota() -> None:
    assert Quota(60, 1000, 5).share(4) == Quota(15, 250, 1)
    assert Quota().share(4) == Quota()
