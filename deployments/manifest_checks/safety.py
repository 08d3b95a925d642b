"""Secrets, users, resources, readiness and budgets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from deployments.manifest_checks.manifests import Json, Manifests, Pod, name_of
from deployments.manifests.names import HTTP_PORT_NAME
from deployments.manifests.worker_groups import PoolName

_SECRET_NAME = re.compile(r"PASSWORD|TOKEN|SECRET|API_KEY|STORE_URL")
ROUTER_SECRETS: Final = ("PACELINE_ADMIN_TOKEN", "PACELINE_STORE_URL")
READY_PATH: Final = "/ready"


def secret_problems(manifests: Manifests) -> Iterator[str]:
    """Secrets are referred to and never written down, and those that are needed are referred to."""
    for secret in manifests.of_kind("Secret"):
        yield f"Secret {name_of(secret)}: secrets are made apart from the manifests"
    for pod in manifests.pods():
        for container in pod.all_containers:
            for variable in container.get("env", ()):
                if _SECRET_NAME.search(variable["name"]) and not _is_reference(variable):
                    yield f"{pod.where}: {container['name']}: {variable['name']} must come from a secret"
    for pod in _routers(manifests):
        referred = {variable["name"] for variable in pod.containers[0].get("env", ()) if _is_reference(variable)}
        for name in ROUTER_SECRETS:
            if name not in referred:
                yield f"{pod.where}: {name} is missing; routers and control need it from a secret"
    if not _is_reference(manifests.ray_cluster.get("gcsFaultToleranceOptions", {}).get("redisPassword", {})):
        yield "gcsFaultToleranceOptions.redisPassword: must come from a secret"


def resource_problems(manifests: Manifests) -> Iterator[str]:
    """Every container says what it needs, and how much memory it may take."""
    for pod in manifests.pods():
        for container in pod.all_containers:
            yield from _resources(f"{pod.where}: {container['name']}", container.get("resources", {}))
    cluster = manifests.ray_cluster
    if cluster.get("enableInTreeAutoscaling"):
        yield from _resources("autoscalerOptions", cluster.get("autoscalerOptions", {}).get("resources", {}))


def user_problems(manifests: Manifests) -> Iterator[str]:
    """Nothing runs as root or can become it."""
    for pod in manifests.pods():
        if not pod.spec.get("securityContext", {}).get("runAsNonRoot"):
            yield f"{pod.where}: securityContext.runAsNonRoot is not set"
        for container in pod.all_containers:
            security = container.get("securityContext", {})
            if security.get("allowPrivilegeEscalation") is not False or security.get("privileged"):
                yield f"{pod.where}: {container['name']}: may gain privileges"


def readiness_problems(manifests: Manifests) -> Iterator[str]:
    """A router gets clients once a generation through it has worked."""
    for pod in _routers(manifests):
        action = pod.containers[0].get("readinessProbe", {}).get("httpGet", {})
        if action.get("path") != READY_PATH or action.get("port") != HTTP_PORT_NAME:
            yield f"{pod.where}: readinessProbe must get {READY_PATH} from port {HTTP_PORT_NAME}"


def budget_problems(manifests: Manifests) -> Iterator[str]:
    """A budget of a RayCluster's pods is a number, and leaves a node's drain something to take."""
    sizes = {pod.where: group for pod, group in zip(manifests.workers(), manifests.worker_groups, strict=True)}
    for budget in manifests.of_kind("PodDisruptionBudget"):
        name, spec = name_of(budget), budget["spec"]
        groups = [sizes[pod.where] for pod in manifests.pods_matching(spec["selector"]) if pod.where in sizes]
        if not isinstance(spec.get("minAvailable"), int):
            yield f"PodDisruptionBudget {name}: Kubernetes counts only minAvailable as a number for a RayCluster's pods"
        elif groups and spec["minAvailable"] >= sum(group.get("minReplicas", 0) for group in groups):
            yield f"PodDisruptionBudget {name}: lets no pod go, so that no node can be drained"


def _routers(manifests: Manifests) -> list[Pod]:
    return [pod for pod in manifests.workers() if pod.labels.get("pool") == PoolName.ROUTER]


def _is_reference(variable: Json) -> bool:
    reference = variable.get("valueFrom", {}).get("secretKeyRef", {})
    return bool(reference.get("name") and reference.get("key") and not reference.get("optional"))


def _resources(where: str, resources: Json) -> Iterator[str]:
    for name in ("cpu", "memory"):
        if name not in resources.get("requests", {}):
            yield f"{where}: requests no {name}"
    if "memory" not in resources.get("limits", {}):
        yield f"{where}: has no limit of memory"
