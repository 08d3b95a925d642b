"""The instruments of a target or draft replica."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cluster.core.step import SchedulerStats, StepStats
from cluster.metrics.buckets import STEP_S


class PoolMetrics:
    """One pool replica's instruments, fed with every engine step."""

    def __init__(self, registry: CollectorRegistry, model: str, pool: str, stats: Callable[[], SchedulerStats]) -> None:
        self._seen: dict[str, int] = {}  # totals already counted, of counters that the scheduler keeps itself

        def count(name: str, text: str) -> Counter:
            return Counter(f"paceline_{name}", text, ("model", "pool"), registry=registry).labels(model, pool)

        def count_by(name: str, text: str, label: str) -> Callable[[str], Counter]:
            counter = Counter(f"paceline_{name}", text, ("model", "pool", label), registry=registry)
            return cache(lambda value: counter.labels(model, pool, value))

        def gauge(name: str, text: str, value: Callable[[SchedulerStats], float]) -> None:
            metric = Gauge(f"paceline_{name}", text, ("model", "pool"), registry=registry)
            metric.labels(model, pool).set_function(lambda: value(stats()))

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

        # p50(paceline_step_seconds{pool="target"}): time of a verification; {pool="draft"}: of one guess (a step
        # of several passes counts once, as their average)
        self._step_s = Histogram(
            "paceline_step_seconds", "One engine step", ("model", "pool"), registry=registry, buckets=STEP_S
        ).labels(model, pool)
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
        self._per_position = count_by("spec_decode_num_accepted_tokens_per_pos", "Accepted, by position", "position")
        # rate(paceline_holds_total[5m]) by outcome: arrived, declined, expired, not_worth
        self._holds = count_by("holds", "Sequences whose block was in flight at a step, by outcome", "outcome")
        # rate(paceline_spec_decode_steps_total[5m]) by tactic: plain, overlap, wait
        self._tactics = count_by("spec_decode_steps", "Steps of nothing but decodes, by the pool's tactic", "tactic")
        # rate(paceline_preemptions_total[5m])
        self._preemptions = count("preemptions", "Sequences preempted for KV and recomputed")
        # rate(paceline_spec_decode_num_stale_blocks_total[5m])
        self._stale = count("spec_decode_num_stale_blocks", "Proposals whose stamp no longer fitted")

        # hit rate: rate(paceline_prefix_cache_hits_total[5m]) / rate(paceline_prefix_cache_queries_total[5m])
        self._queries = count("prefix_cache_queries", "Tokens looked up in the prefix cache")
        self._hits = count("prefix_cache_hits", "Tokens found there")

    def observe_step(self, step: StepStats) -> None:
        """Between two steps of the engine, so as little work as can be."""
        self._step_s.observe(step.duration_s / step.num_passes)
        self._rows.inc(step.num_scheduled_tokens)
        self._emitted.inc(step.num_emitted_tokens)
        self._drafts.inc(step.num_verified_sequences)
        self._draft_tokens.inc(step.num_draft_tokens)
        self._accepted.inc(step.num_accepted_tokens)
        for position, accepted in enumerate(step.accepted_per_position):
            self._per_position(str(position)).inc(accepted)
        self._count_totals(step.scheduler)

    def _count_totals(self, stats: SchedulerStats) -> None:
        for counter, totals in ((self._holds, stats.holds), (self._tactics, stats.tactics)):
            for label, total in totals.items():
                counter(label).inc(self._new(label, total))
        self._preemptions.inc(self._new("preemptions", stats.num_preemptions))
        self._stale.inc(self._new("stale", stats.num_stale_blocks))
        self._queries.inc(self._new("prefix_queries", stats.prefix_cache.num_query_tokens))
        self._hits.inc(self._new("prefix_hits", stats.prefix_cache.num_hit_tokens))

    def _new(self, name: str, total: int) -> int:
        new = total - self._seen.get(name, 0)
        self._seen[name] = total
        return new
