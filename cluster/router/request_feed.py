"""What a router reports to control of each finished request, in batches. Nothing waits for control."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.control.finished_request import FinishedRequest, RequestGuesses, RequestTimes
from cluster.core.speculation import FallbackCause
from cluster.messages.request import Drafter
from cluster.router.observer import RequestFinished
from cluster.transport.control_backend import MAX_RECORDS

CAPACITY = 4096
BATCH_S = 0.5


@dataclass(frozen=True, slots=True)
class FeedTotals:
    """Requests handed to the stream to control, and those that had to give way to later ones."""

    sent: int = 0
    dropped: int = 0


class RequestFeed:
    """Owns the finished requests that control has not been told of: the latest `capacity`. One event loop's."""

    def __init__(self, clock: Callable[[], float], capacity: int = CAPACITY, batch_s: float = BATCH_S) -> None:
        self._clock = clock
        self._waiting: deque[FinishedRequest] = deque(maxlen=capacity)
        self._batch_s = batch_s
        self._some = asyncio.Event()
        self._many = asyncio.Event()
        self.totals = FeedTotals()

    def put(self, event: RequestFinished) -> None:
        """Report a request that ends now; the oldest gives way if there is no room."""
        if len(self._waiting) == self._waiting.maxlen:
            self.totals = FeedTotals(self.totals.sent, self.totals.dropped + 1)
        self._waiting.append(finished_request(event, self._clock()))
        self._some.set()
        if len(self._waiting) >= MAX_RECORDS:
            self._many.set()

    async def next_batch(self) -> Sequence[FinishedRequest]:
        """At least one request, after BATCH_S or once there are MAX_RECORDS; finished_at is on the router's clock."""
        await self._some.wait()
        try:
            async with asyncio.timeout(self._batch_s):
                await self._many.wait()
        except TimeoutError:
            pass  # a small batch, then
        return self._take()

    def _take(self) -> Sequence[FinishedRequest]:
        batch = [self._waiting.popleft() for _ in range(min(MAX_RECORDS, len(self._waiting)))]
        if not self._waiting:
            self._some.clear()
        if len(self._waiting) < MAX_RECORDS:
            self._many.clear()
        self.totals = FeedTotals(self.totals.sent + len(batch), self.totals.dropped)
        return batch


def finished_request(event: RequestFinished, now: float) -> FinishedRequest:
    """What control is told of a request."""
    stats, reading = event.stats, event.reading
    guesses = RequestGuesses(
        event.drafter,
        event.draft_version if event.drafter is Drafter.MODEL else None,
        any(cause != FallbackCause.WITHDRAWN for cause in stats.fallbacks),  # a policy's change is no failure
        stats.acceptance_length if stats.num_steps else None,
        reading.verified_per_position,
        reading.accepted_per_position,
    )
    return FinishedRequest(
        event.request_id,
        now,
        event.labels.model,
        event.labels.tenant,
        event.labels.workload,
        event.outcome,
        event.temperature,
        stats.prompt_tokens,
        stats.completion_tokens,
        reading.policy,
        RequestTimes(event.ttft_s, event.tpot_s, reading.itl_p95_s, reading.itl_p99_s),
        guesses,
    )
