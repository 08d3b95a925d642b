"""A rendered overlay, taken apart into what Ray sees of it on a small machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.config import ClusterConfig
from deployments.manifests.serve_config import serve_config
from deployments.manifests.worker_groups import placed
from tests.e2e.ray_nodes import NodeSpec

DEV = Path(__file__).resolve().parents[2] / "k8s" / "overlays" / "dev" / "rayservice.yaml"
# float32, where tokens must not differ by one; and no more memory than the tests need.
SMALL_POOL = {"dtype": "float32", "kv_blocks": 600, "max_model_len": 2048, "max_num_seqs": 8, "max_queued": 8}

Json = dict[str, Any]


class Overlay:
    """A checked-in RayService."""

    def __init__(self, path: Path, secrets: Mapping[str, str], replaced: Mapping[str, str]) -> None:
        """`secrets` by key. `replaced` are variables of the pods whose values a test chooses."""
        self._spec: Json = yaml.safe_load(path.read_text())["spec"]
        self._secrets = secrets
        self._replaced = replaced

    @property
    def serve_config(self) -> Json:
        """Exactly what the manifest says."""
        config: Json = yaml.safe_load(self._spec["serveConfigV2"])
        return config

    def head(self) -> NodeSpec:
        group = self._spec["rayClusterConfig"]["headGroupSpec"]
        return NodeSpec("head", float(group["resources"]["CPU"]), {}, self._environment(group))

    def worker(self, group_name: str) -> NodeSpec:
        """A pod of this group."""
        groups = {group["groupName"]: group for group in self._spec["rayClusterConfig"]["workerGroupSpecs"]}
        group = groups[group_name]
        return NodeSpec(group_name, _cpus(_container(group)), group["labels"], self._environment(group))

    def _environment(self, group: Json) -> dict[str, str]:
        variables = {entry["name"]: self._value(entry) for entry in _container(group)["env"]}
        return variables | {name: value for name, value in self._replaced.items() if name in variables}

    def _value(self, entry: Json) -> str:
        return entry["value"] if "value" in entry else self._secrets[entry["valueFrom"]["secretKeyRef"]["key"]]


def scaled_down(config: Json, http_port: int, grpc_port: int) -> Json:
    """A Serve configuration with other ports and less memory, and all else as it is."""
    (application,) = config["applications"]
    models = [
        model | {pool: model[pool] | SMALL_POOL for pool in ("target", "draft")}
        for model in application["args"]["models"]
    ]
    return config | {
        "http_options": config["http_options"] | {"port": http_port},
        "grpc_options": config["grpc_options"] | {"port": grpc_port},
        "applications": [application | {"args": application["args"] | {"models": models}}],
    }


def rendered(config: ClusterConfig) -> Json:
    """What the manifest would say for another configuration."""
    return serve_config(placed(config))


def _container(group: Json) -> Json:
    container: Json = group["template"]["spec"]["containers"][0]
    return container


def _cpus(container: Json) -> float:
    """As KubeRay reads them: whole CPUs of the request."""
    return float(int(container["resources"]["requests"]["cpu"].removesuffix("m")) // 1000)
