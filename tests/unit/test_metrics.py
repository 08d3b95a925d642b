from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from cluster.control.finished_request import FollowedPolicy
from cluster.control.policy import Reason
from cluster.core.speculation import FallbackCause
from cluster.core.step import PrefixCacheStats, SchedulerStats, StepStats
from cluster.messages.answer import GenerationStats, PolicyStamp
from cluster.messages.request import Drafter
from cluster.metrics.labels import (
    MAX_DECISIONS,
    MAX_PAIRS,
    MAX_RULES,
    MAX_TENANTS,
    MAX_WORKLOADS,
    DecisionNames,
    RequestNames,
)
from cluster.metrics.pool import PoolMetrics
from cluster.metrics.router import RouterMetrics
from cluster.metrics.serving import serve_metrics
from cluster.router.observer import (
    BlockVerified,
    FellBack,
    Outcome,
    PolicyApplied,
    ProposalForwarded,
    RequestFinished,
    RequestLabels,
    RequestStarted,
    RoundFinished,
    TokensDelivered,
)
from cluster.router.request_meter import MeterReading

pytestmark = pytest.mark.unit

DOCS = Path(__file__).parents[2] / "docs/metrics.md"

LABELS = RequestLabels("m", "acme", "chat")
NAMES = {"model": "m", "tenant": "acme", "workload": "chat"}


def stats(**fields: object) -> SchedulerStats:
    return SchedulerStats(**{"num_running": 2, "num_waiting": 1, "num_used_blocks": 3, "num_total_blocks": 12,
                             "peak_used_blocks": 6, **fields})  # fmt: skip


def step(scheduler: SchedulerStats) -> StepStats:
    return StepStats(0.01, 2, 9, 7, 4, 6, 2, (2, 1, 1), scheduler)


def test_the_routers_tenants_and_workloads_are_bounded() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    for number in range(10_000):
        labels = RequestLabels("m", f"tenant-{number}", f"workload-{number}")
        metrics.request_started(RequestStarted("r", labels, 1))
    (family,) = (f for f in registry.collect() if f.name == "paceline_prompt_tokens")
    totals = {(s.labels["tenant"], s.labels["workload"]): s.value for s in family.samples if s.name.endswith("_total")}
    assert sum(totals.values()) == 10_000
    assert len({tenant for tenant, _ in totals}) <= MAX_TENANTS + 1
    assert ("other", "other") in totals


def hostile_request(metrics: RouterMetrics, number: int) -> None:
    """Every event of a request that nobody has seen the like of."""
    labels = RequestLabels("m", f"tenant-{number // 7}", f"workload-{number}")
    drafter = (Drafter.MODEL, Drafter.NGRAM, Drafter.NONE)[number % 3]
    policy = PolicyStamp(1, f"variant-{number // 3}", list(Reason)[number % len(Reason)], f"rule-{number}")
    reading = MeterReading(0.1, 0.1, (1,), (1,), FollowedPolicy(1, 1, policy.variant, policy.rule))
    metrics.request_started(RequestStarted("r", labels, 1))
    metrics.tokens_delivered(TokensDelivered("r", labels, 1, 0.1, first=True))
    metrics.tokens_delivered(TokensDelivered("r", labels, 1, 0.1, first=False))
    metrics.round_finished(RoundFinished(labels, drafter, 0.1, 0.1, 1))
    metrics.proposal_forwarded(ProposalForwarded(labels, 1))
    metrics.block_verified(BlockVerified(labels, drafter, 0.2, 0.1, 1, 1))
    metrics.fell_back(FellBack(labels, list(FallbackCause)[number % len(FallbackCause)]))
    outcome, generated = list(Outcome)[number % len(Outcome)], GenerationStats(1, number % 5000, 1, policy=policy)
    metrics.request_finished(
        RequestFinished("r", labels, outcome, 0.1, 0.1, 0.1, 0.1, drafter, generated, 0.7, f"draft-{number}", reading)
    )


def test_ten_thousand_hostile_requests_stay_within_the_series_that_the_documentation_states() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    for number in range(10_000):
        hostile_request(metrics, number)
    series = {
        (family.name, *((name, value) for name, value in sample.labels.items() if name != "le"))
        for family in registry.collect()
        for sample in family.samples
    }
    stated = re.search(r"at most ([\d,]+) series for each model in a\s+router", DOCS.read_text())
    assert stated is not None
    assert 1_500 < len(series) <= int(stated[1].replace(",", ""))


def test_pairs_of_tenant_and_workload_are_bounded_and_keep_their_tenant() -> None:
    names = RequestNames()
    asked = [RequestLabels("m", f"t{i % 40}", f"w{i // 40}") for i in range(40 * 18)]
    for _ in range(30):  # busy enough, all of them, to have a name each
        for labels in asked:
            names.see(labels)
    values = {names(labels) for labels in asked}
    assert MAX_PAIRS < len(values) <= MAX_PAIRS + MAX_TENANTS + 1 < 40 * 18
    assert {tenant for _, tenant, _ in values} == {f"t{i}" for i in range(40)}
    assert len({workload for _, _, workload in values}) <= MAX_WORKLOADS + 1


def test_combinations_of_rule_variant_and_reason_are_bounded() -> None:
    names = DecisionNames()
    asked = [PolicyStamp(1, f"v{i % 15}", "rule", f"r{i // 15}") for i in range(40 * 15)]
    for _ in range(30):  # busy enough, all of them, to have a name each
        values = {names.see(policy) for policy in asked}
    assert MAX_DECISIONS // 2 < len(values) <= MAX_DECISIONS + 1
    assert ("other", "other", "rule") in values


def test_a_request_is_counted_from_start_to_finish() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    value = registry.get_sample_value
    metrics.request_started(RequestStarted("r", LABELS, 11))
    assert value("paceline_requests_in_flight", {"model": "m"}) == 1
    metrics.tokens_delivered(TokensDelivered("r", LABELS, 1, 0.05, first=True))
    metrics.tokens_delivered(TokensDelivered("r", LABELS, 3, 0.02, first=False))
    generated = GenerationStats(prompt_tokens=11, completion_tokens=4, num_steps=2)
    finished = RequestFinished("r", LABELS, Outcome.STOP, 0.05, 0.007, 0.08, 0.001, Drafter.MODEL, generated)
    metrics.request_finished(finished)
    assert value("paceline_requests_in_flight", {"model": "m"}) == 0
    assert value("paceline_time_to_first_token_seconds_sum", NAMES) == 0.05
    assert value("paceline_inter_token_latency_seconds_sum", NAMES) == 0.02
    assert value("paceline_time_per_output_token_seconds_sum", NAMES) == 0.007
    assert value("paceline_output_tokens_total", NAMES) == 4
    assert value("paceline_target_steps_total", NAMES) == 2
    assert value("paceline_requests_total", {**NAMES, "outcome": "stop", "drafter": "model"}) == 1


def test_decisions_are_counted_by_rule_variant_and_reason_within_bounds() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    stamps = [PolicyStamp(3, "default", "default"), *(PolicyStamp(3, "canary", "rule", f"r{i}") for i in range(99))]
    for stamp in stamps:
        finished = RequestFinished(
            "r", LABELS, Outcome.STOP, None, None, 0.1, 0.0, Drafter.NONE, GenerationStats(1, 1, policy=stamp)
        )
        metrics.request_started(RequestStarted("r", LABELS, 1))
        metrics.request_finished(finished)
    metrics.policy_applied(PolicyApplied(version=3, num_requests=0))
    (family,) = (f for f in registry.collect() if f.name == "paceline_policy_decisions")
    counts = {s.labels["rule"]: s.value for s in family.samples if s.name.endswith("_total")}
    assert (counts["none"], counts["r0"]) == (1, 1)
    assert sum(counts.values()) == len(stamps)
    assert len(counts) <= MAX_RULES + 2
    assert registry.get_sample_value("paceline_policy_version") == 3
    assert (registry.get_sample_value("paceline_policy_applied_timestamp_seconds") or 0) > time.time() - 60


def test_a_rounds_overhead_is_what_the_draft_did_not_spend() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    names = {"model": "m", "drafter": "model"}
    metrics.request_started(RequestStarted("r", LABELS, 1))
    metrics.round_finished(RoundFinished(LABELS, Drafter.MODEL, 0.006, 0.005, 4))
    metrics.block_verified(BlockVerified(LABELS, Drafter.MODEL, 0.0065, 0.005, 4, 3))
    metrics.block_verified(BlockVerified(LABELS, Drafter.MODEL, 0.0, 0.0, 4, 1))  # its round was not timed
    assert registry.get_sample_value("paceline_round_overhead_seconds_sum", names) == pytest.approx(0.0015)
    assert registry.get_sample_value("paceline_round_overhead_seconds_count", names) == 1
    assert registry.get_sample_value("paceline_accepted_tokens_total", {**NAMES, "drafter": "model"}) == 4
    assert registry.get_sample_value("paceline_verified_tokens_total", {**NAMES, "drafter": "model"}) == 8


def test_proposals_are_counted_and_the_last_one_is_dated() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    before = time.time()
    metrics.proposal_forwarded(ProposalForwarded(LABELS, 4))
    assert registry.get_sample_value("paceline_proposals_forwarded_total", {"model": "m"}) == 1
    last = registry.get_sample_value("paceline_last_proposal_timestamp_seconds", {"model": "m"})
    assert last is not None
    assert before <= last <= time.time()


def test_fallbacks_are_counted_by_cause() -> None:
    registry = CollectorRegistry()
    RouterMetrics(registry).fell_back(FellBack(LABELS, FallbackCause.LOST))
    labels = {"model": "m", "cause": FallbackCause.LOST.value}
    assert registry.get_sample_value("paceline_fallbacks_total", labels) == 1


def test_a_pools_step_is_counted_and_totals_are_counted_once() -> None:
    registry = CollectorRegistry()
    now = stats(holds={"arrived": 2}, num_preemptions=1, num_stale_blocks=4, prefix_cache=PrefixCacheStats(5, 100, 40))
    metrics = PoolMetrics(registry, "m", "target", lambda: now)
    metrics.observe_step(step(now))
    later = stats(
        holds={"arrived": 5}, num_preemptions=1, num_stale_blocks=4, prefix_cache=PrefixCacheStats(6, 180, 64)
    )
    metrics.observe_step(step(later))
    names = {"model": "m", "pool": "target"}
    value = registry.get_sample_value
    assert value("paceline_kv_cache_usage_ratio", names) == 0.25
    assert value("paceline_kv_cache_peak_usage_ratio", names) == 0.5
    assert value("paceline_num_requests_waiting", names) == 1
    assert value("paceline_spec_decode_num_drafts_total", names) == 4
    assert value("paceline_spec_decode_num_accepted_tokens_total", names) == 8
    assert value("paceline_spec_decode_num_accepted_tokens_per_pos_total", {**names, "position": "0"}) == 4
    assert value("paceline_holds_total", {**names, "outcome": "arrived"}) == 5
    assert value("paceline_preemptions_total", names) == 1
    assert value("paceline_spec_decode_num_stale_blocks_total", names) == 4
    assert value("paceline_prefix_cache_blocks", names) == 5
    assert value("paceline_prefix_cache_queries_total", names) == 180
    assert value("paceline_prefix_cache_hits_total", names) == 64


def test_a_process_serves_its_own_registry() -> None:
    registry = CollectorRegistry()
    PoolMetrics(registry, "m", "draft", stats)
    with serve_metrics(registry, "127.0.0.1") as address:
        assert "paceline_num_requests_running" in httpx.get(f"http://{address}/metrics").text


def test_a_replica_whose_metrics_port_is_taken_serves_its_metrics_on_another_one() -> None:
    with serve_metrics(CollectorRegistry(), "127.0.0.1") as taken:
        port = int(taken.rpartition(":")[2])
        with serve_metrics(CollectorRegistry(), "127.0.0.1", port) as address:
            assert address != taken
            assert httpx.get(f"http://{address}/metrics").status_code == 200
