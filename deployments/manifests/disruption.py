"""How many pods of a group a drain of nodes must leave."""

from __future__ import annotations

from typing import Any

from deployments.manifests.names import APP_LABELS, NAME, manifest
from deployments.manifests.worker_groups import WorkerGroup

Json = dict[str, Any]


def disruption_budget(group: WorkerGroup) -> Json | None:
    """One pod may go at a time. None for a group of one: a budget would only block the drain of its node.

    It is a number because Kubernetes computes no `maxUnavailable` for pods of a RayCluster.
    """
    if group.min_replicas < 2:
        return None
    spec = {
        "minAvailable": group.min_replicas - 1,
        "selector": {"matchLabels": APP_LABELS | group.labels},
    }
    return manifest("policy/v1", "PodDisruptionBudget", f"{NAME}-{group.name}", spec)
