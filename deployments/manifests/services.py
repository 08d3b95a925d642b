"""How clients reach the routers."""

from __future__ import annotations

from typing import Any

from deployments.manifests.names import (
    APP_LABELS,
    GRPC_PORT,
    GRPC_PORT_NAME,
    HTTP_PORT,
    HTTP_PORT_NAME,
    NAME,
    manifest,
)
from deployments.manifests.worker_groups import PoolName

Json = dict[str, Any]


def services() -> list[Json]:
    """One address for HTTP and gRPC, and one that gives gRPC clients the address of every router.

    They select routers only. KubeRay's own Service also has the proxies of the pools' nodes, which network policies
    close, and whose streams would break whenever a pool shrinks.
    """
    grpc = {
        "name": GRPC_PORT_NAME,
        "port": GRPC_PORT,
        "targetPort": GRPC_PORT_NAME,
        "appProtocol": "kubernetes.io/h2c",
    }
    http = {"name": HTTP_PORT_NAME, "port": HTTP_PORT, "targetPort": HTTP_PORT_NAME}
    routers = {"selector": APP_LABELS | {"pool": PoolName.ROUTER.value}}
    return [
        manifest("v1", "Service", NAME, routers | {"ports": [http, grpc]}),
        manifest("v1", "Service", f"{NAME}-grpc", routers | {"clusterIP": "None", "ports": [grpc]}),
    ]
