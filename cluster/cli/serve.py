"""`paceline serve`."""

from __future__ import annotations

import signal
import threading

from cluster.cli.admin import ensure_token
from cluster.cli.common import ConfigOption, console, load
from cluster.cli.fetching import fetch_models
from cluster.config import ClusterConfig


def serve(config: ConfigOption = None) -> None:
    """Start a cluster on this machine (or join RAY_ADDRESS) and serve until interrupted."""
    settings = load(config)
    fetch_models(settings)
    token_file = ensure_token()
    from deployments.local_cluster import running

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    console.print("Starting Ray, the router and the pools …")
    with running(settings):
        _print_ready(settings)
        if token_file is not None:
            console.print(f"Admin token: {token_file}", soft_wrap=True)
        stop.wait()
        console.print("Draining and shutting down …")


def _print_ready(config: ClusterConfig) -> None:
    router = config.router
    console.print(f"Ready. HTTP http://{router.host}:{router.http_port}/v1   gRPC {router.host}:{router.grpc_port}")
    console.print("Models: " + ", ".join(model.name for model in config.models) + ".   Ctrl-C stops.")
