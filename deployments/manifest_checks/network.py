"""What selects pods, and who may connect to the pools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from deployments.manifest_checks.manifests import Json, Manifests, matches, name_of
from deployments.manifests.names import HEAD, METRICS_PORT_NAMES
from deployments.manifests.worker_groups import PoolName

_POOLS: Final = (PoolName.DRAFT, PoolName.TARGET)
_MAY_REACH_POOLS: Final = (HEAD, PoolName.ROUTER)


def selector_problems(manifests: Manifests) -> Iterator[str]:
    """Everything that selects pods selects some."""
    for document in manifests.documents:
        selector = _selector(document)
        if selector is not None and not manifests.pods_matching(selector):
            yield f"{document['kind']} {name_of(document)}: selects no pod"


def isolation_problems(manifests: Manifests) -> Iterator[str]:
    """Pools are reached by routers and by the head; metrics by whoever is named."""
    for pod in manifests.workers():
        if pod.labels.get("pool") not in _POOLS:
            continue
        policies = [p for p in manifests.of_kind("NetworkPolicy") if matches(p["spec"]["podSelector"], pod.labels)]
        if not any("Ingress" in policy["spec"].get("policyTypes", ()) for policy in policies):
            yield f"{pod.where}: no network policy selects it, so everybody reaches it"
        for policy in policies:
            for rule in policy["spec"].get("ingress", ()):
                yield from (f"NetworkPolicy {name_of(policy)}: {problem}" for problem in _too_open(rule, manifests))


def _too_open(rule: Json, manifests: Manifests) -> Iterator[str]:
    ports = [port.get("port") for port in rule.get("ports", ())]
    if ports and set(ports) <= set(METRICS_PORT_NAMES):
        return
    if not rule.get("from"):
        yield "lets everybody reach a pool"
    for source in rule.get("from", ()):
        if "podSelector" not in source or "namespaceSelector" in source or "ipBlock" in source:
            yield "lets pods of other namespaces reach a pool"
            continue
        for pod in manifests.pods_matching(source["podSelector"]):
            if pod.labels.get("pool") not in _MAY_REACH_POOLS:
                yield f"lets {pod.where} reach a pool"


def _selector(document: Json) -> Any:
    """The label selector of something that selects pods; None for everything else."""
    spec = document.get("spec", {})
    match document.get("kind"):
        case "Service":
            return {"matchLabels": spec["selector"]}
        case "NetworkPolicy":
            return spec["podSelector"]
        case "PodDisruptionBudget" | "PodMonitor":
            return spec["selector"]
        case _:
            return None
