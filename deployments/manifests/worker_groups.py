"""Which worker groups a configuration needs, and the labels that bring each pool's replicas to its group.

One pod of a group holds one replica. A target replica with several ranks is one pod too, with a GPU for each rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from cluster.config import ClusterConfig, ConfigError, ModelConfig, PoolConfig
from cluster.kubernetes_config import KubernetesConfig, PodConfig

MAX_LABEL = 63


class PoolName(StrEnum):
    """What a worker group is for: the value of its label `pool`."""

    ROUTER = "router"
    DRAFT = "draft"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Pods of one kind. `labels` are those of its Ray nodes and of its pods; num_gpus is a pod's."""

    name: str
    labels: dict[str, str]
    pod: PodConfig
    num_gpus: int
    kind: PoolName
    min_replicas: int
    max_replicas: int


def placed(config: ClusterConfig) -> ClusterConfig:
    """The configuration with label selectors that keep each pool to its own group. Raises ConfigError."""
    labels = [_label(model.name) for model in config.models]
    if len(set(labels)) != len(labels):
        raise ConfigError(f"models: names must differ as labels too, got {labels}")
    router = _selector(PoolName.ROUTER, config.router.label_selector)
    control = _selector(PoolName.ROUTER, config.control.label_selector or router)
    return config.model_copy(
        update={
            "models": tuple(_placed_model(model) for model in config.models),
            "router": config.router.model_copy(update={"label_selector": router}),
            "control": config.control.model_copy(update={"label_selector": control}),
        }
    )


def worker_groups(config: ClusterConfig, kubernetes: KubernetesConfig) -> tuple[WorkerGroup, ...]:
    """The groups of a placed configuration: routers with control, then each model's pools. Raises ConfigError."""
    router = config.router
    size = (router.replicas, router.replicas)
    groups = [_group("router", PoolName.ROUTER, router.label_selector, size, 0, kubernetes)]
    for model in config.models:
        for kind, pool in pools_of(model):
            name = kind.value if len(config.models) == 1 else f"{kind}-{_dns_label(model.name)}"
            groups.append(_group(name, kind, pool.label_selector, _size(pool), _num_gpus(pool), kubernetes))
    known = {"head", *(group.name for group in groups), *(kind.value for kind in PoolName)}
    for name in kubernetes.pods.keys() - known:
        raise ConfigError(f"kubernetes.pods.{name}: there is no such group, only {', '.join(sorted(known))}")
    return tuple(groups)


def pools_of(model: ModelConfig) -> Iterator[tuple[PoolName, PoolConfig]]:
    """A model's pools."""
    if model.draft is not None:
        yield PoolName.DRAFT, model.draft
    yield PoolName.TARGET, model.target


def pod_config(kubernetes: KubernetesConfig, *names: str) -> PodConfig:
    """The pod of the first of these names that has one. Raises ConfigError."""
    for name in names:
        if name in kubernetes.pods:
            return kubernetes.pods[name]
    raise ConfigError(f"kubernetes.pods: needs an entry for {' or '.join(dict.fromkeys(names))}")


def _group(
    name: str,
    kind: PoolName,
    labels: dict[str, str] | None,
    size: tuple[int, int],
    num_gpus: int,
    kubernetes: KubernetesConfig,
) -> WorkerGroup:
    pod = pod_config(kubernetes, name, kind)
    return WorkerGroup(name, labels or {}, pod, num_gpus, kind, *size)


def _placed_model(model: ModelConfig) -> ModelConfig:
    own = {"model": _label(model.name)}
    pools = {
        kind.value: pool.model_copy(update={"label_selector": _selector(kind, pool.label_selector or own)})
        for kind, pool in pools_of(model)
    }
    return model.model_copy(update=pools)


def _selector(kind: PoolName, labels: dict[str, str] | None) -> dict[str, str]:
    """`pool` is always the group's kind: network policies go by it."""
    return {"pool": kind.value} | (labels or {}) | {"pool": kind.value}


def autoscales(config: ClusterConfig) -> bool:
    """Whether any pool's number of replicas changes by itself."""
    return any(pool.autoscaling is not None for model in config.models for _, pool in pools_of(model))


def _size(pool: PoolConfig) -> tuple[int, int]:
    """Fewest and most replicas."""
    scaling = pool.autoscaling
    return (pool.replicas, pool.replicas) if scaling is None else (scaling.min_replicas, scaling.max_replicas)


def _num_gpus(pool: PoolConfig) -> int:
    return math.ceil(pool.num_gpus * pool.tensor_parallel)


def _label(name: str) -> str:
    """A name as the value of a label."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:MAX_LABEL].strip("._-")


def _dns_label(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
