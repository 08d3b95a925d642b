"""Finished requests by one dimension at a time: a row of series for each value, not for each combination of values.

Combinations are what `paceline report` is for. The bound of this module's series is MAX_CHILDREN for each model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from cluster.control.dimensions import (
    MAX_NAMES,
    OUTPUT_LENGTHS,
    PROMPT_LENGTHS,
    TEMPERATURES,
    Dimension,
    Naming,
)
from cluster.control.finished_request import FinishedRequest, Outcome
from cluster.messages.request import Drafter
from cluster.metrics.buckets import LATENCY_S

DIMENSIONS: Final = tuple(dimension for dimension in Dimension if dimension is not Dimension.MODEL)
MAX_POSITIONS: Final = 8  # of a block, told apart; later ones are together

_CHOSEN: Final = frozenset(MAX_NAMES) - {Dimension.MODEL}
_LABELS: Final = ("model", "dimension", "value")
_NUM_DRAFTERS: Final = len(Drafter) - 1  # auto becomes one of the others

MAX_VALUES: Final = (
    sum(MAX_NAMES[dimension] + 2 for dimension in _CHOSEN)  # those with a name, `other` and `none`
    + _NUM_DRAFTERS
    + len(TEMPERATURES)
    + len(PROMPT_LENGTHS)
    + 1
    + len(OUTPUT_LENGTHS)
    + 1
)
MAX_CHILDREN: Final = MAX_VALUES * (len(Outcome) + 3 + 2 * (MAX_POSITIONS + 1) + 3)


class BreakdownMetrics:
    """One router replica's instruments of finished requests, by dimension.

    Every request is counted once in each dimension: a query takes one of them.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._naming = Naming()

        def seconds(name: str, text: str) -> Histogram:
            name = f"paceline_breakdown_{name}_seconds"
            return Histogram(name, text, _LABELS, registry=registry, buckets=LATENCY_S)

        def count(name: str, text: str, *extra: str) -> Counter:
            return Counter(f"paceline_breakdown_{name}", text, (*_LABELS, *extra), registry=registry)

        # sum by (value, outcome) (rate(paceline_breakdown_requests_total{dimension="variant"}[5m]))
        self._requests = count("requests", "Finished requests", "outcome")
        # sum by (value) (rate(paceline_breakdown_fallbacks_total{dimension="draft_version"}[5m]))
        self._fallbacks = count("fallbacks", "Finished requests that had lost a drafter")
        # acceptance length: rate(..._output_tokens_total[5m]) / rate(..._target_steps_total[5m])
        self._tokens = count("output_tokens", "Tokens of finished requests")
        self._steps = count("target_steps", "Target steps that committed them")
        # accepted per position: rate(..._accepted_tokens_total[5m]) / rate(..._verified_tokens_total[5m])
        self._verified = count("verified_tokens", "Guesses verified, by their position in a block", "position")
        self._accepted = count("accepted_tokens", "Guesses accepted, by their position in a block", "position")
        # p95(paceline_breakdown_time_to_first_token_seconds{dimension="prompt_tokens"}) by (value)
        self._ttft = seconds("time_to_first_token", "Arrival to first token")
        # p95(paceline_breakdown_time_per_output_token_seconds{dimension="variant"}) by (value)
        self._tpot = seconds("time_per_output_token", "Mean time per token after the first, per request")
        # p50(paceline_breakdown_inter_token_latency_p95_seconds{dimension="variant"}) by (value)
        self._itl = seconds("inter_token_latency_p95", "P95 of a request's own inter-token latencies")

    def request_finished(self, request: FinishedRequest) -> None:
        """Count one request in every dimension."""
        key = self._naming.see(request)
        for dimension in DIMENSIONS:
            self._count(request, (request.model, dimension.value, key[dimension]))

    def _count(self, request: FinishedRequest, labels: tuple[str, str, str]) -> None:
        guesses, times = request.guesses, request.times
        self._requests.labels(*labels, request.outcome.value).inc()
        if guesses.fell_back:
            self._fallbacks.labels(*labels).inc()
        if guesses.acceptance_length:
            self._tokens.labels(*labels).inc(request.output_tokens)
            self._steps.labels(*labels).inc(request.output_tokens / guesses.acceptance_length)
        _count_positions(self._verified, labels, guesses.verified_per_position)
        _count_positions(self._accepted, labels, guesses.accepted_per_position)
        _observe(self._ttft, labels, times.ttft_s)
        _observe(self._tpot, labels, times.tpot_s)
        _observe(self._itl, labels, times.itl_p95_s)


def _count_positions(counter: Counter, labels: tuple[str, ...], per_position: Sequence[int]) -> None:
    for position, count in enumerate(per_position[:MAX_POSITIONS]):
        counter.labels(*labels, str(position)).inc(count)
    if len(per_position) > MAX_POSITIONS:
        counter.labels(*labels, f"{MAX_POSITIONS}+").inc(sum(per_position[MAX_POSITIONS:]))


def _observe(histogram: Histogram, labels: tuple[str, ...], seconds: float | None) -> None:
    if seconds is not None:
        histogram.labels(*labels).observe(seconds)
