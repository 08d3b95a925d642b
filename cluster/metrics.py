"""Every Prometheus instrument, with the PromQL it is for in the comment above it. Label sets are bounded.

A process has one registry, made by its entry point and passed in; nothing here is global. Metrics observe: nothing
below this layer imports them. `rate` and the quantile of a histogram are meant over 5m where not said:
p95(x) = histogram_quantile(0.95, sum by (le) (rate(x_bucket[5m]))).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from cluster.core.step import SchedulerStats, StepStats
from cluster.messages import PolicyStamp
from cluster.router.observer import (
    BlockVerified,
    FellBack,
    HintDropped,
    PolicyApplied,
    RequestFinished,
    RequestLabels,
    RequestResumed,
    RequestStarted,
    RoundFinished,
    TokensDelivered,
)

MAX_TENANT_LABELS: Final = 50
MAX_WORKLOAD_LABELS: Final = 20
MAX_RULE_LABELS: Final = 50
MAX_VARIANT_LABELS: Final = 20

_STEP_S: Final = (
    0.00025,
    0.0005,
    0.00075,
    0.001,
    0.00125,
    0.0015,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.1,
    0.25,
    1,
    5,
)
_LATENCY_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.35, 0.5, 1, 2, 5, 10, 30)
_REQUEST_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_REQUEST_LABELS: Final = ("model", "tenant", "workload")


class BoundedLabel:
    """The first `limit` distinct values keep their name, every later one is `other`, so a label set cannot grow."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        if value not in self._known and len(self._known) >= self._limit:
            return "other"
        self._known.add(value)
        return value


class RouterMetrics:
    """One router replica's instruments: a RouterObserver."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tenant = BoundedLabel(MAX_TENANT_LABELS)
        self._workload = BoundedLabel(MAX_WORKLOAD_LABELS)
        self._rule = BoundedLabel(MAX_RULE_LABELS)
        self._variant = BoundedLabel(MAX_VARIANT_LABELS)

        def seconds(name: str, text: str, buckets: tuple[float, ...] = _LATENCY_S) -> Histogram:
            return Histogram(f"paceline_{name}_seconds", text, _REQUEST_LABELS, registry=registry, buckets=buckets)

        def count(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"paceline_{name}", text, labels, registry=registry)

        # p95(paceline_time_to_first_token_seconds)
        self._ttft = seconds("time_to_first_token", "Arrival to first token")
        # p95(paceline_inter_token_latency_seconds): between deltas; a delta of a verification carries several tokens
        self._itl = seconds("inter_token_latency", "Between two deltas of a stream")
        # p95(paceline_time_per_output_token_seconds)
        self._tpot = seconds("time_per_output_token", "Mean time per token after the first, per request")
        # p95(paceline_e2e_request_latency_seconds)
        self._e2e = seconds("e2e_request_latency", "Arrival to last token", _REQUEST_S)
        # p95(paceline_request_queue_time_seconds): time waiting for admission
        self._admission = seconds("request_queue_time", "Waiting for admission in the router")
        # sum by (outcome) (rate(paceline_requests_total[5m]))
        self._requests = count("requests", "Finished requests by outcome", *_REQUEST_LABELS, "outcome", "drafter")
        # sum(paceline_requests_in_flight)
        self._in_flight = Gauge("paceline_requests_in_flight", "Requests not finished", ["model"], registry=registry)
        # sum by (tenant) (rate(paceline_prompt_tokens_total[5m]))
        self._prompt_tokens = count("prompt_tokens", "Prompt tokens received", *_REQUEST_LABELS)
        # sum by (tenant) (rate(paceline_output_tokens_total[5m]))
        self._output_tokens = count("output_tokens", "Tokens delivered to clients", *_REQUEST_LABELS)
        # sum(rate(paceline_output_tokens_total[5m])) / sum(rate(paceline_target_steps_total[5m])): acceptance length
        self._target_steps = count("target_steps", "Target steps that committed tokens", *_REQUEST_LABELS)
        # p50(paceline_draft_round_trip_seconds): commit forwarded to block back
        self._round_trip = self._per_round(registry, "draft_round_trip", "Commit forwarded to block back at the router")
        # p50(paceline_draft_time_seconds): the part of it inside the draft replica
        self._draft_time = self._per_round(registry, "draft_time", "Time a round spent in the drafter")
        # p50(paceline_round_overhead_seconds): what router and transport add to a round, as the target sees it
        self._overhead = self._per_round(registry, "round_overhead", "Round trip at the target less the draft's time")
        # acceptance rate by tenant and drafter: rate(paceline_accepted_tokens_total[5m]) / rate(..._verified_...)
        self._verified = count("verified_tokens", "Guesses verified", *_REQUEST_LABELS, "drafter")
        self._accepted = count("accepted_tokens", "Guesses accepted", *_REQUEST_LABELS, "drafter")
        # sum by (cause) (rate(paceline_fallbacks_total[5m]))
        self._fallbacks = count("fallbacks", "Requests that lost their drafter", "model", "cause")
        # sum by (cause) (rate(paceline_hints_dropped_total[5m]))
        self._dropped = count("hints_dropped", "Frames that no longer applied", "model", "cause")
        # sum by (variant, reason) (rate(paceline_policy_decisions_total[5m])): what requests followed when they ended
        self._decisions = count("policy_decisions", "Decisions", "model", "rule", "variant", "reason")
        # min(paceline_policy_version) == max(paceline_policy_version): every router follows the same policy
        self._policy_version = Gauge("paceline_policy_version", "Version of the policy in force", registry=registry)
        # sum by (cause) (rate(paceline_resumes_total[5m]))
        self._resumes = count("resumes", "Requests moved to another target replica", "model", "cause")

    @staticmethod
    def _per_round(registry: CollectorRegistry, name: str, text: str) -> Histogram:
        return Histogram(f"paceline_{name}_seconds", text, ["model", "drafter"], registry=registry, buckets=_STEP_S)

    def _names(self, labels: RequestLabels) -> tuple[str, str, str]:
        return labels.model, self._tenant(labels.tenant), self._workload(labels.workload)

    def request_started(self, event: RequestStarted) -> None:
        self._in_flight.labels(event.labels.model).inc()
        self._prompt_tokens.labels(*self._names(event.labels)).inc(event.prompt_tokens)

    def tokens_delivered(self, event: TokensDelivered) -> None:
        names = self._names(event.labels)
        (self._ttft if event.first else self._itl).labels(*names).observe(event.interval_s)
        self._output_tokens.labels(*names).inc(event.num_tokens)

    def request_finished(self, event: RequestFinished) -> None:
        names = self._names(event.labels)
        self._in_flight.labels(event.labels.model).dec()
        self._requests.labels(*names, event.outcome.value, event.drafter.value).inc()
        self._e2e.labels(*names).observe(event.e2e_s)
        self._admission.labels(*names).observe(event.admission_s)
        self._target_steps.labels(*names).inc(event.stats.num_steps)
        if event.tpot_s is not None:
            self._tpot.labels(*names).observe(event.tpot_s)
        if event.stats.policy is not None:
            self._count_decision(event.labels.model, event.stats.policy)

    def _count_decision(self, model: str, policy: PolicyStamp) -> None:
        rule = "none" if policy.rule is None else self._rule(policy.rule)
        self._decisions.labels(model, rule, self._variant(policy.variant), policy.reason).inc()

    def round_finished(self, event: RoundFinished) -> None:
        names = (event.labels.model, event.drafter.value)
        self._round_trip.labels(*names).observe(event.round_trip_s)
        self._draft_time.labels(*names).observe(event.draft_time_s)

    def block_verified(self, event: BlockVerified) -> None:
        names = (*self._names(event.labels), event.drafter.value)
        self._verified.labels(*names).inc(event.num_draft_tokens)
        self._accepted.labels(*names).inc(event.num_accepted_tokens)
        if event.round_trip_s:
            overhead = max(0.0, event.round_trip_s - event.draft_time_s)
            self._overhead.labels(event.labels.model, event.drafter.value).observe(overhead)

    def fell_back(self, event: FellBack) -> None:
        self._fallbacks.labels(event.labels.model, event.cause.value).inc()

    def hint_dropped(self, event: HintDropped) -> None:
        self._dropped.labels(event.labels.model, event.cause.value).inc()

    def request_resumed(self, event: RequestResumed) -> None:
        self._resumes.labels(event.labels.model, event.cause.value).inc()

    def policy_applied(self, event: PolicyApplied) -> None:
        self._policy_version.set(event.version)


class PoolMetrics:
    """One pool replica's instruments, fed with every engine step."""

    def __init__(self, registry: CollectorRegistry, model: str, pool: str, stats: Callable[[], SchedulerStats]) -> None:
        self._labels = (model, pool)
        self._seen: dict[str, int] = {}  # totals already counted, of counters that the scheduler keeps itself

        def count(name: str, text: str, *extra: str) -> Counter:
            return Counter(f"paceline_{name}", text, ("model", "pool", *extra), registry=registry)

        def gauge(name: str, text: str, value: Callable[[SchedulerStats], float]) -> None:
            metric = Gauge(f"paceline_{name}", text, ("model", "pool"), registry=registry)
            metric.labels(*self._labels).set_function(lambda: value(stats()))

        # sum by (pool) (paceline_num_requests_running)
        gauge("num_requests_running", "Sequences being stepped", lambda s: s.num_running)
        # max by (pool) (paceline_num_requests_waiting)
        gauge("num_requests_waiting", "Sequences waiting to be scheduled", lambda s: s.num_waiting)
        # max by (model, pool) (paceline_kv_cache_usage_ratio)
        gauge("kv_cache_usage_ratio", "Used share of KV blocks", lambda s: s.num_used_blocks / s.num_total_blocks)
        # max by (model, pool) (paceline_kv_cache_peak_usage_ratio)
        gauge("kv_cache_peak_usage_ratio", "Peak used share", lambda s: s.peak_used_blocks / s.num_total_blocks)

        # max by (model, pool) (paceline_prefix_cache_blocks)
        gauge("prefix_cache_blocks", "KV blocks whose contents can be reused", lambda s: s.prefix_cache.num_blocks)

        # p50(paceline_step_seconds{pool="target"}): time of a verification; {pool="draft"}: of one guess
        self._step_s = Histogram(
            "paceline_step_seconds", "One engine step", ("model", "pool"), registry=registry, buckets=_STEP_S
        )
        # rate(paceline_step_tokens_total[5m]): rows through the model
        self._rows = count("step_tokens", "Rows run through the model")
        # rate(paceline_generation_tokens_total[5m])
        self._emitted = count("generation_tokens", "Tokens emitted")
        # rate(paceline_spec_decode_num_drafts_total[5m])
        self._drafts = count("spec_decode_num_drafts", "Verifications")
        # rate(paceline_spec_decode_num_draft_tokens_total[5m])
        self._draft_tokens = count("spec_decode_num_draft_tokens", "Guesses verified")
        # acceptance rate: rate(..._num_accepted_tokens_total[5m]) / rate(..._num_draft_tokens_total[5m])
        # acceptance length: 1 + rate(..._num_accepted_tokens_total[5m]) / rate(..._num_drafts_total[5m])
        self._accepted = count("spec_decode_num_accepted_tokens", "Guesses accepted")
        # rate(..._num_accepted_tokens_per_pos_total[5m]) / ignoring(position) group_left rate(..._num_drafts_total[5m])
        self._per_position = count("spec_decode_num_accepted_tokens_per_pos", "Accepted, by position", "position")
        # rate(paceline_holds_total[5m]) by outcome: arrived, declined, expired, not_worth
        self._holds = count("holds", "Sequences whose block was in flight at a step, by outcome", "outcome")
        # rate(paceline_preemptions_total[5m])
        self._preemptions = count("preemptions", "Sequences preempted for KV and recomputed")
        # rate(paceline_spec_decode_num_stale_blocks_total[5m])
        self._stale = count("spec_decode_num_stale_blocks", "Proposals whose stamp no longer fitted")

        # hit rate: rate(paceline_prefix_cache_hits_total[5m]) / rate(paceline_prefix_cache_queries_total[5m])
        self._queries = count("prefix_cache_queries", "Tokens looked up in the prefix cache")
        self._hits = count("prefix_cache_hits", "Tokens found there")

    def observe_step(self, step: StepStats) -> None:
        labels = self._labels
        self._step_s.labels(*labels).observe(step.duration_s)
        self._rows.labels(*labels).inc(step.num_scheduled_tokens)
        self._emitted.labels(*labels).inc(step.num_emitted_tokens)
        self._drafts.labels(*labels).inc(step.num_verified_sequences)
        self._draft_tokens.labels(*labels).inc(step.num_draft_tokens)
        self._accepted.labels(*labels).inc(step.num_accepted_tokens)
        for position, accepted in enumerate(step.accepted_per_position):
            self._per_position.labels(*labels, str(position)).inc(accepted)
        self._count_totals(step.scheduler)

    def _count_totals(self, stats: SchedulerStats) -> None:
        for outcome, total in stats.holds.items():
            self._holds.labels(*self._labels, outcome).inc(self._new(f"hold:{outcome}", total))
        self._preemptions.labels(*self._labels).inc(self._new("preemptions", stats.num_preemptions))
        self._stale.labels(*self._labels).inc(self._new("stale", stats.num_stale_blocks))
        self._queries.labels(*self._labels).inc(self._new("prefix_queries", stats.prefix_cache.num_query_tokens))
        self._hits.labels(*self._labels).inc(self._new("prefix_hits", stats.prefix_cache.num_hit_tokens))

    def _new(self, name: str, total: int) -> int:
        new = total - self._seen.get(name, 0)
        self._seen[name] = total
        return new


@contextmanager
def serve_metrics(registry: CollectorRegistry, host: str) -> Iterator[str]:
    """Expose `registry` on a free port of `host` while the context is open; gives host:port."""
    server, thread = start_http_server(0, addr=host, registry=registry)
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
