"""Rules that KubeRay 1.7 applies when it reconciles: no schema knows them, and breaking one stops the RayService."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from deployments.manifest_checks.manifests import Json, Manifests, Pod, name_of

MAX_NAME: Final = 47
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_RESOURCE_PARAMS = ("num-cpus", "num-gpus", "memory", "resources")
_REDIS_VARIABLES = ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME")
_AUTOSCALER_VARIABLES = ("RAY_enable_autoscaler_v2", "KUBERAY_GEN_AUTOSCALER_START_CMD")


def operator_problems(manifests: Manifests) -> Iterator[str]:
    """Every rule that is broken."""
    yield from _name(manifests)
    yield from _groups(manifests)
    yield from _autoscaler(manifests)
    yield from _fault_tolerance(manifests)
    yield from _upgrade(manifests.ray_service["spec"], manifests)
    yield from _authentication(manifests.ray_cluster)


def _name(manifests: Manifests) -> Iterator[str]:
    name = name_of(manifests.ray_service)
    if len(name) > MAX_NAME:
        yield f"RayService {name}: the name has {len(name)} characters, KubeRay takes {MAX_NAME}"
    if not _DNS_1035.fullmatch(name):
        yield f"RayService {name}: the name is no DNS-1035 label"
    service = manifests.ray_cluster["headGroupSpec"].get("headService") or {}
    if "name" in service.get("metadata", {}):
        yield "headGroupSpec.headService.metadata.name must not be set"


def _groups(manifests: Manifests) -> Iterator[str]:
    cluster = manifests.ray_cluster
    has_autoscaler = cluster.get("enableInTreeAutoscaling", False)
    for name, group in [("head", cluster["headGroupSpec"]), *((g["groupName"], g) for g in manifests.worker_groups)]:
        params = group.get("rayStartParams", {})
        if group.get("resources") and any(params.get(key) for key in _RESOURCE_PARAMS):
            yield f"group {name}: resources go either into `resources` or into rayStartParams"
        if "labels" in params:
            yield f"group {name}: labels go into `labels`, not into rayStartParams"
        if name == "head":
            continue
        if not has_autoscaler and not {"minReplicas", "maxReplicas"} <= group.keys():
            yield f"group {name}: minReplicas and maxReplicas are needed without an autoscaler"
        if group.get("minReplicas", 0) > group.get("maxReplicas", 1 << 31):
            yield f"group {name}: minReplicas is above maxReplicas"


def _autoscaler(manifests: Manifests) -> Iterator[str]:
    cluster = manifests.ray_cluster
    is_v2 = cluster.get("enableInTreeAutoscaling", False) and _version(cluster) == "v2"
    for pod in [manifests.head(), *manifests.workers()]:
        if is_v2 and pod.spec.get("restartPolicy", "Never") != "Never":
            yield f"{pod.where}: restartPolicy must be Never or unset with autoscaler v2"
    for group in manifests.worker_groups:
        for field in ("idleTimeoutSeconds", "priority"):
            if field in group and not is_v2:
                yield f"group {group['groupName']}: {field} needs autoscaler v2"
    for variable in _variables(manifests.head()) & set(_AUTOSCALER_VARIABLES):
        yield f"head: {variable} is KubeRay's own; use autoscalerOptions"


def _version(cluster: Json) -> Any:
    return cluster.get("autoscalerOptions", {}).get("version", "v1")


def _fault_tolerance(manifests: Manifests) -> Iterator[str]:
    cluster = manifests.ray_cluster
    options = cluster.get("gcsFaultToleranceOptions")
    if options is None:
        yield "gcsFaultToleranceOptions: needed, or everything stops with the head"
        return
    for variable in _variables(manifests.head()) & set(_REDIS_VARIABLES):
        yield f"head: {variable} must not be set beside gcsFaultToleranceOptions"
    for param in ("redis-password", "redis-username"):
        if param in cluster["headGroupSpec"].get("rayStartParams", {}):
            yield f"head: rayStartParams.{param} must not be set beside gcsFaultToleranceOptions"
    if options.get("backend", "redis") == "redis" and "storage" in options:
        yield "gcsFaultToleranceOptions.storage is for the rocksdb backend"


def _upgrade(spec: Json, manifests: Manifests) -> Iterator[str]:
    strategy = spec.get("upgradeStrategy", {})
    if strategy.get("type", "NewCluster") not in ("NewCluster", "NewClusterWithIncrementalUpgrade", "None"):
        yield f"upgradeStrategy.type: {strategy['type']!r} is none that KubeRay knows"
    if strategy.get("type") != "NewClusterWithIncrementalUpgrade":
        return
    options = strategy.get("clusterUpgradeOptions", {})
    if not manifests.ray_cluster.get("enableInTreeAutoscaling", False):
        yield "an incremental upgrade needs enableInTreeAutoscaling"
    if not 0 < options.get("stepSizePercent", 0) <= options.get("maxSurgePercent", 100) <= 100:
        yield "an incremental upgrade needs 0 < stepSizePercent <= maxSurgePercent <= 100"
    if options.get("intervalSeconds", 0) <= 0:
        yield "an incremental upgrade needs intervalSeconds above 0"
    if not options.get("gatewayClassName"):
        yield "an incremental upgrade needs gatewayClassName"
    yield "an incremental upgrade carries HTTP only: gRPC clients would be cut off"


def _authentication(cluster: Json) -> Iterator[str]:
    if cluster.get("authOptions", {}).get("mode") != "token":
        yield "authOptions.mode: must be token, or whoever reaches the head runs code there"
    elif not cluster.get("rayVersion"):
        yield "rayVersion: needed with token authentication"


def _variables(pod: Pod) -> set[str]:
    return {variable["name"] for variable in pod.containers[0].get("env", ())}
