"""The instruments of a router."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cluster.metrics.breakdown import BreakdownMetrics
from cluster.metrics.buckets import LATENCY_S, REQUEST_S, STEP_S
from cluster.metrics.labels import DecisionNames, RequestNames
from cluster.router.observer import (
    BlockVerified,
    FellBack,
    HintDropped,
    PolicyApplied,
    ProposalForwarded,
    RequestFinished,
    RequestResumed,
    RequestStarted,
    RoundFinished,
    TokensDelivered,
)
from cluster.router.request_feed import finished_request

_REQUEST_LABELS: Final = ("model", "tenant", "workload")


class RouterMetrics:
    """One router replica's instruments: a RouterObserver."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._names = RequestNames()
        self._decided = DecisionNames()
        self._breakdown = BreakdownMetrics(registry)

        def seconds(name: str, text: str, buckets: tuple[float, ...] = LATENCY_S) -> Histogram:
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
        self._e2e = seconds("e2e_request_latency", "Arrival to last token", REQUEST_S)
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
        # rate(paceline_proposals_forwarded_total[5m])
        self._proposals = count("proposals_forwarded", "Proposals with guesses, sent to a target", "model")
        # time() - paceline_last_proposal_timestamp_seconds: how long the switch has been off, or nothing to guess
        self._last_proposal = Gauge(
            "paceline_last_proposal_timestamp_seconds", "Unix time of the last of them", ["model"], registry=registry
        )
        # paceline_last_proposal_timestamp_seconds <= it, once speculation is off for everyone
        self._policy_applied = Gauge(
            "paceline_policy_applied_timestamp_seconds", "Unix time of putting it in force", registry=registry
        )
        # sum by (cause) (rate(paceline_resumes_total[5m]))
        self._resumes = count("resumes", "Requests moved to another target replica", "model", "cause")

    @staticmethod
    def _per_round(registry: CollectorRegistry, name: str, text: str) -> Histogram:
        return Histogram(f"paceline_{name}_seconds", text, ["model", "drafter"], registry=registry, buckets=STEP_S)

    def request_started(self, event: RequestStarted) -> None:
        self._in_flight.labels(event.labels.model).inc()
        self._prompt_tokens.labels(*self._names.see(event.labels)).inc(event.prompt_tokens)

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
            self._decisions.labels(event.labels.model, *self._decided.see(event.stats.policy)).inc()

        self._breakdown.request_finished(finished_request(event, now=0.0))  # when does not matter here

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

    def proposal_forwarded(self, event: ProposalForwarded) -> None:
        self._proposals.labels(event.labels.model).inc()
        self._last_proposal.labels(event.labels.model).set_to_current_time()

    def fell_back(self, event: FellBack) -> None:
        self._fallbacks.labels(event.labels.model, event.cause.value).inc()

    def hint_dropped(self, event: HintDropped) -> None:
        self._dropped.labels(event.labels.model, event.cause.value).inc()

    def request_resumed(self, event: RequestResumed) -> None:
        self._resumes.labels(event.labels.model, event.cause.value).inc()

    def policy_applied(self, event: PolicyApplied) -> None:
        self._policy_version.set(event.version)
        self._policy_applied.set_to_current_time()
