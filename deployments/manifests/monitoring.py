"""Where a Prometheus operator finds metrics, and what it is to raise an alarm about."""

from __future__ import annotations

from typing import Any

from deployments.manifests.alerts import ALERTS
from deployments.manifests.names import (
    APP_METRICS_PORT_NAME,
    HEAD,
    NAME,
    RAY_METRICS_PORT_NAME,
    manifest,
    pods_of,
)
from deployments.manifests.worker_groups import PoolName

Json = dict[str, Any]

# What Ray's own dashboards tell nodes and clusters apart by.
_RELABEL = [
    {"sourceLabels": ["__meta_kubernetes_pod_label_ray_io_cluster"], "targetLabel": "ray_io_cluster"},
    {"sourceLabels": ["__meta_kubernetes_pod_label_pool"], "targetLabel": "pod_pool"},
]


def monitors() -> list[Json]:
    """The head's three endpoints, and two of every worker: Ray's, and the one of the replica that runs there."""
    workers = [kind.value for kind in PoolName]
    return [
        _monitor(HEAD, [HEAD], [RAY_METRICS_PORT_NAME, "as-metrics", "dash-metrics"]),
        _monitor("workers", workers, [RAY_METRICS_PORT_NAME, APP_METRICS_PORT_NAME]),
    ]


def alert_rules() -> Json:
    """The alerts as a PrometheusRule."""
    rules = [
        {
            "alert": f"Paceline{alert.name}",
            "expr": alert.expr,
            "for": alert.after,
            "labels": {"severity": alert.severity.value},
            "annotations": {"summary": alert.summary, "description": alert.action},
        }
        for alert in ALERTS
    ]
    return manifest("monitoring.coreos.com/v1", "PrometheusRule", NAME, {"groups": [{"name": NAME, "rules": rules}]})


def _monitor(name: str, pools: list[str], ports: list[str]) -> Json:
    spec = {
        "jobLabel": "app.kubernetes.io/part-of",
        "selector": pods_of(*pools),
        "podMetricsEndpoints": [{"port": port, "relabelings": _RELABEL} for port in ports],
    }
    return manifest("monitoring.coreos.com/v1", "PodMonitor", f"{NAME}-{name}", spec)
