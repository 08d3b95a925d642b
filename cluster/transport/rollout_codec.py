"""Rollouts ↔ their form on the wire."""

from __future__ import annotations

from cluster.control.analysis import Metric, MetricResult, Verdict
from cluster.control.rollout import Phase
from cluster.control.rollout_entry import RolloutEvent, RolloutView
from protos.paceline.v1 import control_pb2 as pb


def view_to_wire(view: RolloutView) -> pb.Rollout:
    return pb.Rollout(
        rollout_id=view.rollout_id,
        rule=view.rule,
        text=view.text,
        author=view.author,
        reason=view.reason,
        started_at=view.started_at,
        revision=view.revision,
        phase=view.phase.value,
        step_index=view.step_index,
        since=view.since,
        percent=view.percent,
        is_pending=view.is_pending,
        why=view.why,
        verdict=None if view.verdict is None else view.verdict.value,
        results=map(_result_to_wire, view.results),
        events=map(_event_to_wire, view.events),
        num_canary=view.num_canary,
        num_control=view.num_control,
    )


def view_from_wire(message: pb.Rollout) -> RolloutView:
    """Raises ValueError for a phase, verdict or metric that this program does not know."""
    return RolloutView(
        message.rollout_id,
        message.rule,
        message.text,
        message.author,
        message.reason,
        message.started_at,
        message.revision,
        Phase(message.phase),
        message.step_index,
        message.since,
        message.percent,
        message.is_pending,
        message.why,
        Verdict(message.verdict) if message.HasField("verdict") else None,
        tuple(map(_result_from_wire, message.results)),
        tuple(map(_event_from_wire, message.events)),
        message.num_canary if message.HasField("num_canary") else None,
        message.num_control if message.HasField("num_control") else None,
    )


def _result_to_wire(result: MetricResult) -> pb.MetricResult:
    return pb.MetricResult(
        metric=result.metric.value,
        verdict=result.verdict.value,
        reason=result.reason,
        num_canary=result.num_canary,
        num_control=result.num_control,
        estimate=result.estimate,
        low=result.low,
        high=result.high,
    )


def _result_from_wire(message: pb.MetricResult) -> MetricResult:
    return MetricResult(
        Metric(message.metric),
        Verdict(message.verdict),
        message.reason,
        message.num_canary,
        message.num_control,
        message.estimate if message.HasField("estimate") else None,
        message.low if message.HasField("low") else None,
        message.high if message.HasField("high") else None,
    )


def _event_to_wire(event: RolloutEvent) -> pb.RolloutEvent:
    return pb.RolloutEvent(
        at=event.at, phase=event.phase.value, step_index=event.step_index, percent=event.percent, reason=event.reason
    )


def _event_from_wire(message: pb.RolloutEvent) -> RolloutEvent:
    return RolloutEvent(message.at, Phase(message.phase), message.step_index, message.percent, message.reason)
