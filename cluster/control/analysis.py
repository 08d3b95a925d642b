"""Whether a canary is as good as its control, decided with a stated confidence. Pure; docs/rollouts.md has the method.

fail           some metric is beyond its limit, with confidence
pass           every metric is within its limit, with confidence
inconclusive   else: too few samples, or too near the limit for so few
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.control import intervals
from cluster.control.cohort import Measurement, RequestRecord
from cluster.control.intervals import Interval


class Metric(StrEnum):
    """Latencies and lengths compare a quantile over requests, rates the share of requests."""

    TTFT = "ttft"
    TPOT = "tpot"
    ITL_P95 = "itl_p95"  # each request's own P95
    ITL_P99 = "itl_p99"
    ACCEPTANCE_LENGTH = "acceptance_length"
    ERROR_RATE = "error_rate"
    FALLBACK_RATE = "fallback_rate"


RATES = frozenset({Metric.ERROR_RATE, Metric.FALLBACK_RATE})


class Compare(StrEnum):
    """What a limit is about."""

    RATIO = "ratio"  # canary / control
    DIFFERENCE = "difference"  # canary - control, in seconds, tokens, or share of requests
    CANARY = "canary"  # the canary alone


class Bound(StrEnum):
    AT_MOST = "at_most"
    AT_LEAST = "at_least"


class Verdict(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One condition. `quantile` is of no concern to rates; `confidence` is that of a pass, and of a fail of the whole
    analysis."""

    metric: Metric
    limit: float
    bound: Bound = Bound.AT_MOST
    compare: Compare = Compare.RATIO
    quantile: float = 0.5
    min_samples: int = 100  # per cohort
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class MetricResult:
    """What one condition came to. Bounds are those that decided; None where the samples give none."""

    metric: Metric
    verdict: Verdict
    reason: str
    num_canary: int
    num_control: int
    estimate: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Assessment:
    """What an analysis came to, metric by metric."""

    verdict: Verdict
    reason: str
    results: tuple[MetricResult, ...]


def assess(specs: Sequence[MetricSpec], measurement: Measurement, num_looks: int = 1) -> Assessment:
    """Decide on at least one condition.

    If all metrics are at their limits and a window is looked at `num_looks` times, it fails by chance at most as often
    as 1 - confidence says: each condition of each look gets its part of that. A pass needs no such care, since all
    conditions have to pass, as long as only one look may pass the analysis.
    """
    results = tuple(_assess_one(spec, measurement, len(specs) * num_looks) for spec in specs)
    for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE):
        reasons = [result.reason for result in results if result.verdict is verdict]
        if reasons:
            return Assessment(verdict, "; ".join(reasons), results)
    return Assessment(Verdict.PASS, "every metric is within its limit", results)


def _assess_one(spec: MetricSpec, measurement: Measurement, num_tests: int) -> MetricResult:
    canary, control = _values(spec.metric, measurement.canary), _values(spec.metric, measurement.control)
    needed = [canary] if spec.compare is Compare.CANARY else [canary, control]
    if min(map(len, needed)) < max(spec.min_samples, 1):
        reason = f"{spec.metric}: {len(canary)} canary and {len(control)} control samples, {spec.min_samples} needed"
        return MetricResult(spec.metric, Verdict.INCONCLUSIVE, reason, len(canary), len(control))
    alpha = 1.0 - spec.confidence
    beyond = _compare(spec, canary, control, alpha / num_tests)
    within = _compare(spec, canary, control, alpha)
    verdict = _verdict(spec, beyond, within)
    decided = within if verdict is Verdict.PASS else beyond
    reason = _reason(spec, verdict, decided)
    numbers = (_finite(number) for number in (decided.estimate, decided.low, decided.high))
    return MetricResult(spec.metric, verdict, reason, len(canary), len(control), *numbers)


def _verdict(spec: MetricSpec, beyond: Interval, within: Interval) -> Verdict:
    """A fail has the stricter bounds, so that it and a pass exclude each other."""
    if spec.bound is Bound.AT_MOST:
        fails, passes = beyond.low > spec.limit, within.high <= spec.limit
    else:
        fails, passes = beyond.high < spec.limit, within.low >= spec.limit
    if fails:
        return Verdict.FAIL
    return Verdict.PASS if passes else Verdict.INCONCLUSIVE


def _compare(spec: MetricSpec, canary: Sequence[float], control: Sequence[float], alpha: float) -> Interval:
    own = _interval(spec, canary, alpha)
    if spec.compare is Compare.CANARY:
        return own
    other = _interval(spec, control, alpha)
    return intervals.ratio(own, other) if spec.compare is Compare.RATIO else intervals.difference(own, other)


def _interval(spec: MetricSpec, values: Sequence[float], alpha: float) -> Interval:
    if spec.metric in RATES:
        return intervals.rate_interval(round(sum(values)), len(values), alpha)
    return intervals.quantile_interval(values, spec.quantile, alpha)


def _values(metric: Metric, records: Sequence[RequestRecord]) -> list[float]:
    values = (_value(metric, record) for record in records)
    return [value for value in values if value is not None]


def _value(metric: Metric, record: RequestRecord) -> float | None:
    match metric:
        case Metric.TTFT:
            return record.ttft_s
        case Metric.TPOT:
            return record.tpot_s
        case Metric.ITL_P95:
            return record.itl_p95_s
        case Metric.ITL_P99:
            return record.itl_p99_s
        case Metric.ACCEPTANCE_LENGTH:
            return record.acceptance_length
        case Metric.ERROR_RATE:
            return float(record.failed)
        case Metric.FALLBACK_RATE:
            return float(record.fell_back)


def _reason(spec: MetricSpec, verdict: Verdict, decided: Interval) -> str:
    what = str(spec.metric) if spec.metric in RATES else f"{spec.metric} P{100 * spec.quantile:g}"
    limit = f"{spec.bound.replace('_', ' ')} {spec.limit:g}"
    found = f"{spec.compare} {decided.estimate:.4g} [{decided.low:.4g}, {decided.high:.4g}]"
    said = {Verdict.PASS: "is", Verdict.FAIL: "is not", Verdict.INCONCLUSIVE: "may or may not be"}[verdict]
    return f"{what}: {found} {said} {limit}"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
