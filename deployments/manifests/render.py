"""A configuration's manifests: a kustomize base that is the same for all, and an overlay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from cluster.config import ClusterConfig, ConfigError
from cluster.kubernetes_config import KubernetesConfig
from deployments.manifests.disruption import disruption_budget
from deployments.manifests.documents import to_yaml
from deployments.manifests.monitoring import alert_rules, monitors
from deployments.manifests.network import monitoring_policy, network_policies, redis_policy
from deployments.manifests.ray_service import ray_service
from deployments.manifests.redis import redis
from deployments.manifests.services import services
from deployments.manifests.worker_groups import placed, worker_groups

Json = dict[str, Any]


def render(config: ClusterConfig, overlay: str) -> dict[PurePosixPath, str]:
    """The text of every file by its path under k8s/. Raises ConfigError."""
    kubernetes = config.kubernetes
    if kubernetes is None:
        raise ConfigError("kubernetes: needed to render manifests")
    base = {"services.yaml": services(), "network.yaml": network_policies()}
    own = _overlay(placed(config), kubernetes)
    return _in_folder("base", base, {}) | _in_folder(
        f"overlays/{overlay}", own, {"namespace": kubernetes.namespace}, ["../../base"]
    )


def _overlay(config: ClusterConfig, kubernetes: KubernetesConfig) -> dict[str, list[Json]]:
    budgets = [disruption_budget(group) for group in worker_groups(config, kubernetes)]
    files = {
        "namespace.yaml": [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": kubernetes.namespace}}],
        "rayservice.yaml": [ray_service(config, kubernetes)],
        "disruption.yaml": [budget for budget in budgets if budget is not None],
    }
    if kubernetes.redis.image is not None:
        files["redis.yaml"] = [*redis(kubernetes.redis.image, kubernetes.secret), redis_policy()]
    if kubernetes.monitoring_namespace is not None:
        files["monitoring.yaml"] = [*monitors(), alert_rules(), monitoring_policy(kubernetes.monitoring_namespace)]
    return {name: documents for name, documents in files.items() if documents}


def _in_folder(
    folder: str, files: dict[str, list[Json]], settings: Json, resources: Sequence[str] = ()
) -> dict[PurePosixPath, str]:
    """The files and the kustomization that lists them."""
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        **settings,
        "resources": [*resources, *files],
    }
    texts = {name: to_yaml(*documents) for name, documents in files.items()}
    texts["kustomization.yaml"] = to_yaml(kustomization)
    return {PurePosixPath(folder) / name: text for name, text in texts.items()}
