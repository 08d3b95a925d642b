"""A configuration's manifests: a kustomize base that is the same for all, and an overlay."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from cluster.config import ClusterConfig, ConfigError
from cluster.kubernetes_config import KubernetesConfig
from deployments.manifests.documents import to_yaml
from deployments.manifests.ray_service import ray_service
from deployments.manifests.worker_groups import placed

Json = dict[str, Any]


def render(config: ClusterConfig, overlay: str) -> dict[PurePosixPath, str]:
    """The text of every file by its path under k8s/. Raises ConfigError."""
    kubernetes = config.kubernetes
    if kubernetes is None:
        raise ConfigError("kubernetes: needed to render manifests")
    return _in_folder("base", _base()) | _in_folder(f"overlays/{overlay}", _overlay(placed(config), kubernetes))


def _base() -> dict[str, list[Json]]:
    return {}


def _overlay(config: ClusterConfig, kubernetes: KubernetesConfig) -> dict[str, list[Json]]:
    return {
        "namespace.yaml": [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": kubernetes.namespace}}],
        "rayservice.yaml": [ray_service(config, kubernetes)],
    }


def _in_folder(folder: str, files: dict[str, list[Json]]) -> dict[PurePosixPath, str]:
    return {PurePosixPath(folder) / name: to_yaml(*documents) for name, documents in files.items()}
