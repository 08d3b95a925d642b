"""What operators are woken up for, by Paceline's own metrics."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Severity(StrEnum):
    """How soon somebody must look."""

    CRITICAL = "critical"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. `after` is how long `expr` must hold; `action` says what to do."""

    name: str
    expr: str
    after: str
    severity: Severity
    summary: str
    action: str


_FAILED = 'sum by (model) (rate(paceline_requests_total{outcome=~"error|unavailable"}[5m]))'
_FINISHED = "sum by (model) (rate(paceline_requests_total[5m]))"

ALERTS: Final = (
    Alert(
        "RequestsFail",
        f"{_FAILED} / {_FINISHED} > 0.01",
        "5m",
        Severity.CRITICAL,
        "More than 1 % of the requests for {{ $labels.model }} fail",
        "Look at the logs of routers and targets; paceline status shows which replicas are there.",
    ),
    Alert(
        "NoTargets",
        'absent(paceline_num_requests_running{pool="target"})',
        "2m",
        Severity.CRITICAL,
        "No target replica reports",
        "Nothing is served. See why the pods of the target group are not running: kubectl describe.",
    ),
    Alert(
        "Overloaded",
        'sum by (model) (rate(paceline_requests_total{outcome="overloaded"}[5m])) > 0',
        "10m",
        Severity.WARNING,
        "Requests for {{ $labels.model }} are turned away",
        "Raise max_replicas of the target pool, or lower the quota of the tenant that sends most.",
    ),
    Alert(
        "SlowFirstToken",
        "histogram_quantile(0.95, sum by (model, le) (rate(paceline_time_to_first_token_seconds_bucket[5m]))) > 5",
        "10m",
        Severity.WARNING,
        "One of twenty requests for {{ $labels.model }} waits more than 5 s for its first token",
        "Compare paceline_request_queue_time_seconds with it: a long queue wants more target replicas.",
    ),
    Alert(
        "KvCacheFull",
        "max by (model, pool) (paceline_kv_cache_usage_ratio) > 0.95",
        "10m",
        Severity.WARNING,
        "The KV cache of the {{ $labels.pool }} pool of {{ $labels.model }} is full",
        "Sequences are preempted and computed again. More replicas, or more KV memory in each, help.",
    ),
    Alert(
        "DraftsLost",
        'sum by (model) (rate(paceline_fallbacks_total{cause=~"draft_lost|draft_slow"}[5m])) > 0.1',
        "10m",
        Severity.WARNING,
        "Requests for {{ $labels.model }} keep losing their draft",
        "They go on as plain decoding, more slowly. Look at the draft pool, or switch speculation off.",
    ),
    Alert(
        "TargetsLost",
        "sum by (model, cause) (rate(paceline_resumes_total[5m])) > 0.1",
        "10m",
        Severity.WARNING,
        "Requests for {{ $labels.model }} keep moving to another target: {{ $labels.cause }}",
        "No output is lost, but work is done twice. Look at the target pool's pods.",
    ),
    Alert(
        "PoliciesDiffer",
        "max(paceline_policy_version) - min(paceline_policy_version) > 0",
        "2m",
        Severity.CRITICAL,
        "Routers follow different policies",
        "A kill switch may not hold everywhere. paceline policy status names the router and its reason.",
    ),
    Alert(
        "FeedDrops",
        "delta(paceline_feed_records_dropped[10m]) > 0",
        "10m",
        Severity.WARNING,
        "Rollouts and reports miss finished requests",
        "The control service is away or too slow. Analyses of rollouts count fewer requests than there are.",
    ),
)
