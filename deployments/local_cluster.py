"""A Ray cluster for one machine: start it, run the application on it, wait until it answers, take it down."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions

from cluster.config import ClusterConfig
from deployments.app import build
from deployments.ingress_proxy import haproxy_settings
from deployments.names import APPLICATION, GRPC_SERVICER_FUNCTIONS, NICENESS, NICENESS_VARIABLE
from deployments.priority import let_ray_yield_to_pools

OBJECT_STORE_BYTES = 100 * 2**20  # nothing large travels through Ray's object store
CONTROL_LOOP_INTERVAL_S = "0.3"  # Ray's own 0.1 takes its controller 4 % of a core, which the pools here compute on


@contextmanager
def running(config: ClusterConfig) -> Iterator[None]:
    """Serve `config` while the context is open. Joins the cluster that RAY_ADDRESS names, else starts a local one."""
    with haproxy_settings(os.environ):
        _connect()
        try:
            _serve(config)
            let_ray_yield_to_pools()
            yield
        finally:
            serve.delete(APPLICATION)  # waits until the replicas have drained; other applications stay
            ray.shutdown()


def _connect() -> None:
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False)
        return
    # Ray turns token authentication on for a bare local start; a demo on loopback needs none.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault(NICENESS_VARIABLE, NICENESS)
    os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", CONTROL_LOOP_INTERVAL_S)
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        configure_logging=False,
    )


def _serve(config: ClusterConfig) -> None:
    router = config.router
    serve.start(
        http_options=HTTPOptions(host=router.host, port=router.http_port),
        grpc_options=gRPCOptions(port=router.grpc_port, grpc_servicer_functions=list(GRPC_SERVICER_FUNCTIONS)),
    )
    serve.run(build(config), name=APPLICATION, route_prefix="/")
