"""What some finished requests had in common: counts, and distributions of times. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.control.finished_request import FAILURES, FinishedRequest
from cluster.control.log_histogram import LogHistogram


class Cell:
    """Owns counts that add up: adding requests to two cells and merging them is adding all of them to one.

    ttft, tpot, itl_p95, itl_p99: distributions over requests, in seconds; the ITLs are of each request's own quantiles.
    verified, accepted: guesses by their position in a block. num_steps: target steps that emitted output_tokens.
    """

    __slots__ = (
        "accepted", "failed", "fell_back", "itl_p95", "itl_p99", "num_steps", "output_tokens", "requests", "tpot",
        "ttft", "verified",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests = 0
        self.failed = 0
        self.fell_back = 0
        self.output_tokens = 0
        self.num_steps = 0
        self.verified: list[int] = []
        self.accepted: list[int] = []
        self.ttft = LogHistogram()
        self.tpot = LogHistogram()
        self.itl_p95 = LogHistogram()
        self.itl_p99 = LogHistogram()

    def add(self, request: FinishedRequest) -> None:
        """Count one request."""
        guesses, times = request.guesses, request.times
        self.requests += 1
        self.failed += request.outcome in FAILURES
        self.fell_back += guesses.fell_back
        if guesses.acceptance_length:
            self.output_tokens += request.output_tokens
            self.num_steps += round(request.output_tokens / guesses.acceptance_length)
        _add_each(self.verified, guesses.verified_per_position)
        _add_each(self.accepted, guesses.accepted_per_position)
        _add_time(self.ttft, times.ttft_s)
        _add_time(self.tpot, times.tpot_s)
        _add_time(self.itl_p95, times.itl_p95_s)
        _add_time(self.itl_p99, times.itl_p99_s)

    def merge(self, other: Cell) -> None:
        """Count everything that another cell has counted."""
        self.requests += other.requests
        self.failed += other.failed
        self.fell_back += other.fell_back
        self.output_tokens += other.output_tokens
        self.num_steps += other.num_steps
        _add_each(self.verified, other.verified)
        _add_each(self.accepted, other.accepted)
        self.ttft.merge(other.ttft)
        self.tpot.merge(other.tpot)
        self.itl_p95.merge(other.itl_p95)
        self.itl_p99.merge(other.itl_p99)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted per target step; None before the first."""
        return self.output_tokens / self.num_steps if self.num_steps else None

    @property
    def num_verifications(self) -> int:
        """Target steps that had guesses to verify."""
        return self.verified[0] if self.verified else 0


def _add_each(totals: list[int], more: Sequence[int]) -> None:
    totals += [0] * (len(more) - len(totals))
    for position, count in enumerate(more):
        totals[position] += count


def _add_time(times: LogHistogram, seconds: float | None) -> None:
    if seconds is not None:
        times.add(seconds)
