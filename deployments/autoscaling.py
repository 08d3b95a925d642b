"""How many replicas each pool gets, as Serve asks for it: for all pools of an application together.

It is the application's policy and not each deployment's, because a draft pool grows by what targets await.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from statistics import fmean
from typing import Any

from cluster.core.scaling import PoolSignals, draft_replicas, target_replicas
from deployments.names import model_of_draft, target_deployment

_SIGNALS = tuple(field.name for field in fields(PoolSignals))


def pool_replicas(contexts: Mapping[Any, Any]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
    """Serve's AutoscalingContext by deployment to numbers of replicas. A pool that reports nothing stays as it is."""
    signals = {context.deployment_name: _signals(context) for context in contexts.values()}
    decisions: dict[Any, int] = {}
    for key, context in contexts.items():
        own = signals[context.deployment_name]
        if own is not None:
            decisions[key] = _decide(context.deployment_name, context.current_num_replicas, own, signals)
    return decisions, {}


def _decide(name: str, current: int, own: PoolSignals, signals: Mapping[str, PoolSignals | None]) -> int:
    model = model_of_draft(name)
    if model is None:
        return target_replicas(current, own)
    targets = signals.get(target_deployment(model))
    return draft_replicas(current, own, 0.0 if targets is None else targets.late_blocks)


def _signals(context: Any) -> PoolSignals | None:
    """Means over the replicas that run; None if none of them has reported."""
    running = set(context.running_replicas)
    reported: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    values = {name: _of(running, reported.get(name, {})) for name in _SIGNALS}
    if not all(values.values()):
        return None
    return PoolSignals(**{name: fmean(each) for name, each in values.items()})


def _of(running: set[Any], values: Mapping[Any, float]) -> list[float]:
    pairs: Iterable[tuple[Any, float]] = values.items()
    return [value for replica, value in pairs if replica in running]
