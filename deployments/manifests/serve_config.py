"""What Ray Serve is told: the application's builder with the configuration as its arguments, and what applies in place.

Arguments are the file's own content with three things taken out, since Serve restarts every replica when they change:
the `kubernetes` section, numbers of replicas (Serve's `num_replicas` and `autoscaling_config`), and the live part
(Serve's `user_config`).
"""

from __future__ import annotations

from typing import Any, Final

from cluster.config import ClusterConfig, PoolConfig
from deployments.live_config import LIVE_FIELDS, live_part
from deployments.manifests.worker_groups import PoolName, autoscales, pools_of
from deployments.names import (
    APPLICATION,
    AUTOSCALING_POLICY,
    BUILDER,
    CONTROL,
    GRPC_SERVICER_FUNCTIONS,
    ROUTER,
    draft_deployment,
    target_deployment,
)

Json = dict[str, Any]
ONE_PER_POD: Final[Json] = {"max_replicas_per_node": 1}
_SCALE: Final = {"replicas", "autoscaling"}
_DEPLOYMENT: Final = {PoolName.TARGET: target_deployment, PoolName.DRAFT: draft_deployment}


def serve_config(config: ClusterConfig) -> Json:
    """The content of `serveConfigV2` for a placed configuration."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": config.router.http_port},
        "grpc_options": {
            "port": config.router.grpc_port,
            "grpc_servicer_functions": list(GRPC_SERVICER_FUNCTIONS),
        },
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": "/",
                "import_path": BUILDER,
                **_autoscaling_policy(config),
                "args": builder_args(config),
                "deployments": _deployments(config),
            }
        ],
    }


def builder_args(config: ClusterConfig) -> Json:
    """The configuration as the builder gets it, without what applies in place and without defaults."""
    in_place: dict[str, Any] = {section: set(names) for section, names in LIVE_FIELDS.items()}
    in_place["models"] = {"__all__": {"target": _SCALE, "draft": _SCALE}}
    args = config.model_dump(mode="json", exclude_defaults=True, exclude=in_place | {"kubernetes": True})
    return {section: value for section, value in args.items() if value != {}}


def _deployments(config: ClusterConfig) -> list[Json]:
    live = live_part(config)
    overrides: list[Json] = [
        {"name": ROUTER, "num_replicas": config.router.replicas, "user_config": live} | ONE_PER_POD,
        {"name": CONTROL, "user_config": live},
    ]
    for model in config.models:
        overrides += [{"name": _DEPLOYMENT[kind](model.name)} | _scale(pool) for kind, pool in pools_of(model)]
    return overrides


def _autoscaling_policy(config: ClusterConfig) -> Json:
    return {"autoscaling_policy": {"policy_function": AUTOSCALING_POLICY}} if autoscales(config) else {}


def _scale(pool: PoolConfig) -> Json:
    scale: Json = {"num_replicas": pool.replicas}
    if pool.autoscaling is not None:
        scale = {"num_replicas": "auto", "autoscaling_config": pool.autoscaling.model_dump(mode="json")}
    return scale if pool.tensor_parallel > 1 else scale | ONE_PER_POD  # Serve takes no placement group with it
