"""Who may connect to whom. Whatever no policy allows is refused; nothing is said about connections out."""

from __future__ import annotations

from typing import Any

from deployments.manifests.names import (
    APP_LABELS,
    DASHBOARD_PORT_NAME,
    GRPC_PORT_NAME,
    HEAD,
    HTTP_PORT_NAME,
    METRICS_PORT_NAMES,
    NAME,
    REDIS,
    REDIS_PORT,
    manifest,
    pods_of,
)
from deployments.manifests.worker_groups import PoolName

Json = dict[str, Any]

_POOLS = (PoolName.DRAFT.value, PoolName.TARGET.value)
_OPERATOR = {
    "namespaceSelector": {},
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
}
_REDIS_CLEANUP = {"podSelector": {"matchLabels": {"ray.io/node-type": "redis-cleanup"}}}  # a job of KubeRay's


def network_policies() -> list[Json]:
    """Clients reach routers' two ports. Pools are reached by routers and by the head, which runs Serve's controller."""
    routers = {"podSelector": pods_of(PoolName.ROUTER)}
    cluster = {"podSelector": pods_of(HEAD, *(kind.value for kind in PoolName))}
    head = {"podSelector": pods_of(HEAD)}
    return [
        _policy(
            "router", [PoolName.ROUTER], [_allow([cluster]), {"ports": [_port(HTTP_PORT_NAME), _port(GRPC_PORT_NAME)]}]
        ),
        _policy("pools", list(_POOLS), [_allow([routers, head])]),
        _policy("head", [HEAD], [_allow([cluster]), _allow([_OPERATOR], DASHBOARD_PORT_NAME, HTTP_PORT_NAME)]),
    ]


def redis_policy() -> Json:
    """Redis is reached by the head, by the control service, and by KubeRay's clean-up after a cluster."""
    sources = [{"podSelector": pods_of(PoolName.ROUTER)}, {"podSelector": pods_of(HEAD)}, _REDIS_CLEANUP]
    return _policy("redis", [REDIS], [_allow(sources, REDIS_PORT)])


def monitoring_policy(namespace: str) -> Json:
    """Prometheus, in its own namespace, reaches metrics and nothing else."""
    source = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    spec = {
        "podSelector": {"matchLabels": APP_LABELS},
        "policyTypes": ["Ingress"],
        "ingress": [_allow([source], *METRICS_PORT_NAMES)],
    }
    return manifest("networking.k8s.io/v1", "NetworkPolicy", f"{NAME}-monitoring", spec)


def _policy(name: str, pools: list[str], ingress: list[Json]) -> Json:
    spec = {"podSelector": pods_of(*pools), "policyTypes": ["Ingress"], "ingress": ingress}
    return manifest("networking.k8s.io/v1", "NetworkPolicy", f"{NAME}-{name}", spec)


def _allow(sources: list[Json], *ports: str | int) -> Json:
    """Ingress from these; to all ports if none is named."""
    return {"from": sources} | ({"ports": [_port(port) for port in ports]} if ports else {})


def _port(port: str | int) -> Json:
    return {"protocol": "TCP", "port": port}
