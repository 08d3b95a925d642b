"""What is measured of a request, and how it waits to be reported."""

from __future__ import annotations

import asyncio

import pytest

from cluster.control.cohort import Cohort, RequestRecord
from cluster.control.finished_request import FinishedRequest, FollowedPolicy, Outcome, RequestTimes, cohort_record
from cluster.control.log_histogram import RELATIVE_ERROR
from cluster.core.speculation import FallbackCause
from cluster.messages.answer import GenerationStats, PolicyStamp
from cluster.messages.request import Drafter
from cluster.messages.rounds import Commit
from cluster.router.observer import RequestFinished, RequestLabels
from cluster.router.request_feed import RequestFeed
from cluster.router.request_meter import RequestMeter
from cluster.transport.control_backend import MAX_RECORDS
from tests.toy_cluster import collect, request, toy_cluster

pytestmark = pytest.mark.unit


def event(request_id: str, **fields: object) -> RequestFinished:
    labels = RequestLabels("m", "acme", "chat")
    values = {
        "request_id": request_id, "labels": labels, "outcome": Outcome.STOP, "ttft_s": 0.1, "tpot_s": 0.02,
        "e2e_s": 1.0, "admission_s": 0.0, "drafter": Drafter.MODEL, "stats": GenerationStats(3, 4, num_steps=2),
    }  # fmt: skip
    return RequestFinished(**{**values, **fields})  # type: ignore[arg-type]


# --- the meter -------------------------------------------------------------------------------------------------------


def test_guesses_are_counted_by_their_position_in_the_block() -> None:
    meter = RequestMeter()
    for verified, accepted in ((2, 1), (0, 0), (4, 4), (1, 0)):
        meter.note_step(Commit("r", 5, (1,), num_draft_tokens=verified, num_accepted_tokens=accepted))
    reading = meter.read()
    assert reading.verified_per_position == (3, 2, 1, 1)
    assert reading.accepted_per_position == (2, 1, 1, 1)


def test_intervals_are_those_of_the_request_itself() -> None:
    meter = RequestMeter()
    assert meter.read().itl_p95_s is None
    for interval_s in [0.01] * 96 + [0.5] * 4:
        meter.note_interval(interval_s)
    reading = meter.read()
    assert reading.itl_p95_s == pytest.approx(0.01, rel=RELATIVE_ERROR)
    assert reading.itl_p99_s == pytest.approx(0.5, rel=RELATIVE_ERROR)


def test_a_request_that_changes_its_cohort_is_mixed_for_good() -> None:
    meter = RequestMeter()
    for version, variant in ((3, "canary"), (4, "canary"), (5, "control"), (6, "canary")):
        meter.follow(PolicyStamp(version, variant, "rule", "r"))
        expected = FollowedPolicy(version, 3, variant, "r", is_mixed=version >= 5)
        assert meter.read().policy == expected


# --- the feed --------------------------------------------------------------------------------------------------------


async def test_a_full_batch_does_not_wait_and_a_small_one_does_not_wait_for_ever() -> None:
    feed = RequestFeed(lambda: 7.0, batch_s=3600.0)
    waiting = asyncio.create_task(feed.next_batch())
    for number in range(MAX_RECORDS + 1):
        feed.put(event(f"r{number}"))
    assert [record.request_id for record in await waiting] == [f"r{number}" for number in range(MAX_RECORDS)]
    left = RequestFeed(lambda: 7.0, batch_s=0.001)
    left.put(event("one"))
    assert [record.request_id for record in await left.next_batch()] == ["one"]
    assert (feed.totals.sent, feed.totals.dropped) == (MAX_RECORDS, 0)


async def test_without_a_reader_the_oldest_give_way_and_are_counted() -> None:
    feed = RequestFeed(lambda: 7.0, capacity=3, batch_s=0.001)
    for number in range(5):
        feed.put(event(f"r{number}"))
    assert feed.totals.dropped == 2
    assert [record.request_id for record in await feed.next_batch()] == ["r2", "r3", "r4"]


async def test_a_policys_change_is_no_fallback() -> None:
    feed = RequestFeed(lambda: 7.0, batch_s=0.001)
    for cause in FallbackCause:
        feed.put(event(cause, stats=GenerationStats(3, 4, fallbacks=(cause.value,))))
    fell_back = {record.request_id: record.guesses.fell_back for record in await feed.next_batch()}
    assert fell_back == {cause: cause is not FallbackCause.WITHDRAWN for cause in FallbackCause}


async def test_the_router_reports_what_a_request_did() -> None:
    feed = RequestFeed(lambda: 7.0, batch_s=0.001)
    async with toy_cluster(1, 1) as cluster:
        cluster.router.on_finished = feed.put
        await collect(cluster.router, request("r", max_tokens=30))
        (record,) = await feed.next_batch()
    assert (record.request_id, record.outcome, record.output_tokens) == ("r", Outcome.LENGTH, 30)
    assert record.policy == FollowedPolicy(0, 0, "default")
    assert record.guesses.num_verified >= record.guesses.num_accepted
    assert record.times.ttft_s is not None
    assert record.times.itl_p95_s is not None


# --- cohorts ---------------------------------------------------------------------------------------------------------


def finished(**policy: object) -> FinishedRequest:
    followed = FollowedPolicy(**{"version": 9, "since_version": 5, "variant": "fast", "rule": "r", **policy})  # type: ignore[arg-type]
    return FinishedRequest("id", 3.0, "m", "t", "w", Outcome.ERROR, policy=followed, times=RequestTimes(ttft_s=0.5))


def test_a_request_counts_in_the_cohort_that_it_followed_from_its_start() -> None:
    canary = RequestRecord("id", Cohort.CANARY, 3.0, failed=True, ttft_s=0.5)
    assert cohort_record(finished(), "r", 5) == canary
    assert cohort_record(finished(variant="control"), "r", 5) == RequestRecord(
        "id", Cohort.CONTROL, 3.0, failed=True, ttft_s=0.5
    )
    for other in (finished(rule="s"), finished(rule=None), finished(since_version=4), finished(is_mixed=True)):
        assert cohort_record(other, "r", 5) is None
    assert cohort_record(FinishedRequest("id", 3.0, "m", "t", "w", Outcome.INVALID), "r", 0) is None
