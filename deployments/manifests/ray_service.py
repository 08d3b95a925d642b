"""The RayService: one Ray cluster whose head serves nothing, and what it serves."""

from __future__ import annotations

from typing import Any

from cluster.config import ClusterConfig
from cluster.kubernetes_config import KubernetesConfig
from deployments.manifests.documents import body
from deployments.manifests.names import (
    APP_LABELS,
    NAME,
    RAY_VERSION,
    REDIS_PASSWORD_KEY,
    REDIS_PORT,
    secret_ref,
)
from deployments.manifests.pods import CONTAINER_SECURITY, head_template, worker_template
from deployments.manifests.serve_config import serve_config
from deployments.manifests.worker_groups import WorkerGroup, autoscales, worker_groups

Json = dict[str, Any]

IDLE_TIMEOUT_S = 300  # how long a pod without a replica is kept
AUTOSCALER = {
    "enableInTreeAutoscaling": True,
    "autoscalerOptions": {
        "version": "v2",
        "idleTimeoutSeconds": IDLE_TIMEOUT_S,
        "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": CONTAINER_SECURITY,
    },
}
OBJECT_STORE_BYTES = 100 * 2**20  # nothing large travels through Ray's object store


def ray_service(config: ClusterConfig, kubernetes: KubernetesConfig) -> Json:
    """The RayService of a placed configuration."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": NAME, "labels": APP_LABELS},
        "spec": {
            "upgradeStrategy": {"type": "NewCluster"},
            "excludeHeadPodFromServeSvc": True,
            "serveConfigV2": body(serve_config(config)),
            "rayClusterConfig": _ray_cluster(config, kubernetes),
        },
    }


def _ray_cluster(config: ClusterConfig, kubernetes: KubernetesConfig) -> Json:
    return {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},
        "gcsFaultToleranceOptions": {
            "redisAddress": kubernetes.redis.address or f"{NAME}-redis:{REDIS_PORT}",
            "redisPassword": {"valueFrom": secret_ref(kubernetes.secret, REDIS_PASSWORD_KEY)},
        },
        **(AUTOSCALER if autoscales(config) else {}),
        "headGroupSpec": {
            "resources": {"CPU": "0"},  # no replica is placed there
            "rayStartParams": _start_params(),
            "template": head_template(config, kubernetes),
        },
        "workerGroupSpecs": [_worker_group(group, config, kubernetes) for group in worker_groups(config, kubernetes)],
    }


def _worker_group(group: WorkerGroup, config: ClusterConfig, kubernetes: KubernetesConfig) -> Json:
    return {
        "groupName": group.name,
        "labels": group.labels,
        "replicas": group.min_replicas,
        "minReplicas": group.min_replicas,
        "maxReplicas": group.max_replicas,
        "rayStartParams": _start_params(),
        "template": worker_template(group, config, kubernetes),
    }


def _start_params() -> dict[str, str]:
    return {"object-store-memory": str(OBJECT_STORE_BYTES)}
