"""What a gray release compares: requests of two cohorts, sampled evenly and within a bounded memory.

A sample keeps the requests with the smallest hashes of their ids (bottom-k sampling): a uniform sample without
replacement that needs no random numbers. It does not depend on the order of requests, a request that is reported
twice counts once, and samples of several routers merge by adding the records of one to the other.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

DEFAULT_CAPACITY = 4096  # requests per cohort and window


class Cohort(StrEnum):
    CANARY = "canary"  # the rule's percentage
    CONTROL = "control"  # those whom the rule matches but its percentage leaves out


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request, as routers report it; None where it has no such value. Times are in seconds.

    itl_p95_s and itl_p99_s are quantiles of this request's own inter-token latencies: the latencies inside a request
    depend on one another, requests hardly do, so requests are what gets compared.
    """

    request_id: str
    cohort: Cohort
    finished_at: float  # Unix time
    failed: bool = False
    fell_back: bool = False  # speculation was wanted and given up at least once
    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_p95_s: float | None = None
    itl_p99_s: float | None = None
    acceptance_length: float | None = None  # tokens emitted per target step


@dataclass(frozen=True, slots=True)
class Measurement:
    """Both cohorts over the same window of time, started_at ≤ finished_at < ended_at."""

    started_at: float
    ended_at: float
    canary: tuple[RequestRecord, ...] = ()
    control: tuple[RequestRecord, ...] = ()


class CohortSample:
    """Owns an even sample of at most `capacity` of the requests that were added."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        self._records: dict[str, RequestRecord] = {}
        self._largest: list[tuple[int, str]] = []  # (-hash, request_id): a heap with the largest hash on top

    def add(self, record: RequestRecord) -> None:
        """The first record of a request stays."""
        if record.request_id in self._records:
            return
        rank = (-_hash(record.request_id), record.request_id)
        if len(self._records) < self._capacity:
            heapq.heappush(self._largest, rank)
        elif rank > self._largest[0]:
            del self._records[heapq.heapreplace(self._largest, rank)[1]]
        else:
            return
        self._records[record.request_id] = record

    def records(self) -> tuple[RequestRecord, ...]:
        """Ordered by hash, so that equal samples are equal tuples."""
        return tuple(self._records[request_id] for _, request_id in sorted(self._largest, reverse=True))


class CohortWindow:
    """Owns what a window of time has shown of both cohorts so far."""

    def __init__(self, started_at: float, capacity: int = DEFAULT_CAPACITY) -> None:
        self.started_at = started_at
        self._samples = {cohort: CohortSample(capacity) for cohort in Cohort}

    def add(self, records: Iterable[RequestRecord]) -> None:
        """Requests that finished before the window are left out; so is what an earlier percentage did to them."""
        for record in records:
            if record.finished_at >= self.started_at:
                self._samples[record.cohort].add(record)

    def measurement(self, ended_at: float) -> Measurement:
        canary, control = (
            tuple(record for record in self._samples[cohort].records() if record.finished_at < ended_at)
            for cohort in (Cohort.CANARY, Cohort.CONTROL)
        )
        return Measurement(self.started_at, ended_at, canary, control)


def _hash(request_id: str) -> int:
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big")
