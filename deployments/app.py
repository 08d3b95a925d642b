"""Build the Serve application from a configuration: a router, a control service, and two pools per model."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application

from cluster.config import ClusterConfig, ModelConfig, PoolConfig
from cluster.runtime.threads import OPENMP_ENVIRONMENT
from deployments.control import ControlReplica
from deployments.draft import DraftReplica
from deployments.names import CONTROL, ROUTER, draft_deployment, target_deployment
from deployments.router import RouterReplica
from deployments.target import TargetReplica

MAX_ONGOING_REQUESTS = 10_000  # the router's own admission bounds what runs; Serve must not stop it before
_HEALTH = {"health_check_period_s": 2, "health_check_timeout_s": 30, "graceful_shutdown_timeout_s": 30}
_GROUP_CHECK_PERIOD_S = 0.5


def build(config: ClusterConfig) -> Application:
    """The whole system as one application whose ingress is the router."""
    pools: dict[str, Application] = {}
    for model in config.models:
        pools[f"{model.name}/target"] = _target_pool(model, config)
        if model.draft is not None:
            pools[f"{model.name}/draft"] = _draft_pool(model, model.draft, config)
    router = serve.deployment(
        RouterReplica,
        name=ROUTER,
        num_replicas=config.router.replicas,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": config.router.num_cpus} | _on_nodes(config.router.label_selector),
        **_HEALTH,
    )
    return router.bind(config, pools, _control(config))


def build_from_config(args: dict[str, Any]) -> Application:
    """The builder that a Serve config file names: `args` is the configuration file's content."""
    return build(ClusterConfig.model_validate(args))


def _control(config: ClusterConfig) -> Application:
    control = serve.deployment(
        ControlReplica,
        name=CONTROL,
        num_replicas=1,
        ray_actor_options={"num_cpus": config.control.num_cpus} | _on_nodes(config.control.label_selector),
        **_HEALTH,
    )
    return control.bind(config)


def _target_pool(model: ModelConfig, config: ClusterConfig) -> Application:
    deployment = serve.deployment(TargetReplica, name=target_deployment(model.name), **pool_options(model.target))
    return deployment.bind(model, config.speculation, config.device)


def _draft_pool(model: ModelConfig, draft: PoolConfig, config: ClusterConfig) -> Application:
    deployment = serve.deployment(DraftReplica, name=draft_deployment(model.name), **pool_options(draft))
    return deployment.bind(model, config.device)


def pool_options(pool: PoolConfig) -> dict[str, Any]:
    """How Serve runs a pool's replicas, and where."""
    # Before torch is loaded: idle OpenMP threads must not spin on cores that another pool's process needs.
    environment = {"env_vars": dict(OPENMP_ENVIRONMENT)}
    actor = {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus, "runtime_env": environment}
    options = {"num_replicas": pool.replicas, "max_ongoing_requests": 100, **_HEALTH}
    if pool.tensor_parallel > 1:
        return options | {"ray_actor_options": actor} | _group_options(pool)
    return options | {"ray_actor_options": actor | _on_nodes(pool.label_selector)}


def _group_options(pool: PoolConfig) -> dict[str, Any]:
    """A replica of several ranks: a bundle for each, all on one machine; the replica itself sits in the first."""
    resources = {"CPU": pool.num_cpus, "GPU": pool.num_gpus}
    bundle = {name: amount for name, amount in resources.items() if amount}
    options = {
        "placement_group_bundles": [bundle] * pool.tensor_parallel,
        "placement_group_strategy": "STRICT_PACK",
        # Serve replaces a replica after three failed checks in a row, and any rank's death ends a group.
        "health_check_period_s": _GROUP_CHECK_PERIOD_S,
    }
    if pool.label_selector:
        options["placement_group_bundle_label_selector"] = [dict(pool.label_selector)] * pool.tensor_parallel
    return options


def _on_nodes(labels: dict[str, str] | None) -> dict[str, Any]:
    """Actor options that keep a replica to nodes with these labels."""
    return {"label_selector": dict(labels)} if labels else {}
