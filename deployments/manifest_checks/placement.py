"""Whether every replica finds a pod that it fits in, and every pod a replica."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cluster.config import ClusterConfig
from deployments.manifest_checks.manifests import Json, ManifestError, Manifests
from deployments.manifest_checks.quantities import amount
from deployments.names import CONTROL, ROUTER, draft_deployment, target_deployment

GPU = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class Replicas:
    """One deployment's replicas: where they must be, how many there may be, and what each rank of one needs."""

    deployment: str
    labels: Mapping[str, str]
    num_replicas: int
    num_ranks: int
    num_cpus: float
    num_gpus: float


def placement_problems(manifests: Manifests) -> Iterator[str]:
    """Labels that lead nowhere, groups that nobody asks for, and a head that would serve."""
    everyone = list(_replicas(manifests))
    groups = manifests.worker_groups
    for each in everyone:
        if not each.labels:
            yield f"{each.deployment}: has no label_selector, and would run in any group"
        elif not _groups_for(each, groups):
            yield f"{each.deployment}: no group has the labels {_text(each.labels)}"
    for group in groups:
        if not group.get("labels", {}).get("pool"):
            yield f"group {group['groupName']}: has no label `pool`"
        if not any(_is_for(group, each) for each in everyone):
            yield f"group {group['groupName']}: no deployment asks for its labels {_text(group.get('labels', {}))}"
    if manifests.ray_cluster["headGroupSpec"].get("resources", {}).get("CPU") != "0":
        yield 'head: must have resources {CPU: "0"}, or replicas are placed there'


def bundle_problems(manifests: Manifests) -> Iterator[str]:
    """A pod holds the bundles of one replica, and every GPU of it is in one of them."""
    for each in _replicas(manifests):
        for group in _groups_for(each, manifests.worker_groups):
            yield from _fit(each, group)


def capacity_problems(manifests: Manifests) -> Iterator[str]:
    """A group has a pod for every replica that Serve may start."""
    for each in _replicas(manifests):
        groups = _groups_for(each, manifests.worker_groups)
        pods = sum(group.get("maxReplicas", 0) for group in groups)
        if groups and each.num_replicas > pods:
            yield f"{each.deployment}: may have {each.num_replicas} replicas, and its group only {pods} pods"
        started = sum(group.get("replicas", 0) for group in groups)
        if each.num_replicas > started and not manifests.ray_cluster.get("enableInTreeAutoscaling"):
            yield f"{each.deployment}: may have {each.num_replicas} replicas, and nothing adds pods to its {started}"


def _fit(each: Replicas, group: Json) -> Iterator[str]:
    resources = group["template"]["spec"]["containers"][0].get("resources", {})
    available = resources.get("requests", {}) | resources.get("limits", {})
    cpus, gpus = math.ceil(amount(available.get("cpu", 0))), amount(available.get(GPU, 0))
    needed_cpus, needed_gpus = each.num_cpus * each.num_ranks, each.num_gpus * each.num_ranks
    where = f"group {group['groupName']}"
    if needed_cpus > cpus:
        yield f"{where}: {each.deployment} needs {needed_cpus:g} CPUs in one pod, which has {cpus}"
    if needed_gpus > gpus:
        yield f"{where}: {each.deployment} needs {needed_gpus:g} GPUs in one pod, which has {gpus:g}"
    elif gpus > math.ceil(needed_gpus):
        yield f"{where}: {gpus - math.ceil(needed_gpus):g} GPUs of a pod are in no bundle of {each.deployment}"
    if each.num_ranks > 1 and 2 * needed_cpus <= cpus and 2 * needed_gpus <= gpus:
        yield f"{where}: two replicas of {each.deployment} fit in one pod"


def _replicas(manifests: Manifests) -> Iterator[Replicas]:
    """The replicas of a Serve config whose arguments are good; what they are otherwise, its own check says."""
    for application in manifests.serve_config.get("applications", ()):
        try:
            config = ClusterConfig.model_validate(application.get("args", {}))
        except ValidationError as error:
            raise ManifestError(f"args: {error}") from error
        entries = {entry.get("name"): entry for entry in application.get("deployments", ())}
        yield from _replicas_of(config, entries)


def _replicas_of(config: ClusterConfig, entries: Mapping[str, Json]) -> Iterator[Replicas]:
    router, control = config.router, config.control
    yield Replicas(ROUTER, router.label_selector or {}, _most(entries.get(ROUTER, {})), 1, router.num_cpus, 0)
    yield Replicas(CONTROL, control.label_selector or {}, 1, 1, control.num_cpus, 0)
    for model in config.models:
        for name, pool in ((target_deployment(model.name), model.target), (draft_deployment(model.name), model.draft)):
            if pool is not None:
                labels, most = pool.label_selector or {}, _most(entries.get(name, {}))
                yield Replicas(name, labels, most, pool.tensor_parallel, pool.num_cpus, pool.num_gpus)


def _most(entry: Json) -> int:
    scaling: Json = entry.get("autoscaling_config") or {}
    most: Any = scaling["max_replicas"] if "max_replicas" in scaling else entry.get("num_replicas", 1)
    return int(most)


def _groups_for(each: Replicas, groups: list[Json]) -> list[Json]:
    return [group for group in groups if _is_for(group, each)]


def _is_for(group: Json, each: Replicas) -> bool:
    labels: Mapping[str, str] = group.get("labels", {})
    return bool(each.labels) and each.labels.items() <= labels.items()


def _text(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in labels.items()) or "(none)"
