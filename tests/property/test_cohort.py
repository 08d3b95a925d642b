"""Samples of cohorts: even, bounded, and the same whatever order requests are reported in."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.cohort import Cohort, CohortSample, CohortWindow, RequestRecord

pytestmark = pytest.mark.property

request_ids = st.lists(st.text(max_size=4), max_size=60)


def record(request_id: str, finished_at: float = 0.0, cohort: Cohort = Cohort.CANARY) -> RequestRecord:
    return RequestRecord(request_id, cohort, finished_at)


def sample_of(request_ids: list[str], capacity: int) -> tuple[RequestRecord, ...]:
    sample = CohortSample(capacity)
    for request_id in request_ids:
        sample.add(record(request_id))
    return sample.records()


@given(request_ids, st.integers(1, 20), st.randoms())
def test_order_and_repetition_do_not_matter(ids: list[str], capacity: int, random: random.Random) -> None:
    expected = sample_of(ids, capacity)
    shuffled = ids + ids[: len(ids) // 2]
    random.shuffle(shuffled)
    assert sample_of(shuffled, capacity) == expected
    assert len(expected) == min(len(set(ids)), capacity)


@given(request_ids, request_ids, st.integers(1, 20))
def test_samples_merge_to_the_sample_of_all(left: list[str], right: list[str], capacity: int) -> None:
    parts = [one.request_id for part in (left, right) for one in sample_of(part, capacity)]
    assert sample_of(parts, capacity) == sample_of(left + right, capacity)


def test_every_request_is_sampled_with_the_same_chance() -> None:
    kept = [int(one.request_id) for one in sample_of([str(number) for number in range(20_000)], 2000)]
    tenths = [sum(1 for number in kept if number // 2000 == tenth) for tenth in range(10)]
    assert all(abs(count - 200) < 5 * 200**0.5 for count in tenths)


def test_the_first_report_of_a_request_counts() -> None:
    sample = CohortSample()
    sample.add(record("a"))
    sample.add(replace(record("a"), failed=True))
    assert sample.records() == (record("a"),)


def test_a_window_keeps_cohorts_apart_and_takes_what_finished_inside() -> None:
    window = CohortWindow(started_at=10.0, capacity=2)
    canary = [record(f"c{number}", 10.0 + number) for number in range(2)]
    control = [record(f"k{number}", 10.0 + number, Cohort.CONTROL) for number in range(2)]
    window.add([*canary, *control, record("before", 9.9), record("after", 12.0, Cohort.CONTROL)])
    measured = window.measurement(ended_at=11.0)
    assert (measured.started_at, measured.ended_at) == (10.0, 11.0)
    assert measured.canary == (canary[0],)
    assert {one.finished_at < 11.0 for one in measured.control} <= {True}
    assert len(window.measurement(ended_at=100.0).control) == 2
