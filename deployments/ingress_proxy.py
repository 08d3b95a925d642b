"""What carries client traffic to the router on one machine: HAProxy, in front of the router's own servers.

Ray Serve's other proxy is a Python process that takes up every chunk of every stream: some 2 ms of processor time a
token, on cores that the pools compute with. HAProxy comes with Ray Serve; a process finds these settings in its
environment, which it has from the Ray node that starts it.
"""

from __future__ import annotations

import socket
from collections.abc import MutableMapping
from contextlib import ExitStack
from pathlib import Path

_STREAM_S = 24 * 3600  # how long a stream may go on after another router has come or gone


def set_proxy_environment(environment: MutableMapping[str, str], folder: Path) -> None:
    """Fill in what is not set yet, for a Ray node that is about to start; its HAProxy's files go to `folder`.

    RAY_SERVE_ENABLE_HA_PROXY=0 keeps the Python process.
    """
    stats_port, metrics_port, http_port, grpc_port = _free_ports(4)
    settings = {
        "ENABLE_HA_PROXY": "1",
        "HAPROXY_CONFIG_FILE_LOC": folder / "haproxy.cfg",
        "HAPROXY_SOCKET_PATH": folder / "admin.sock",
        "HAPROXY_SERVER_STATE_BASE": folder,
        "HAPROXY_SERVER_STATE_FILE": folder / "server-state",
        "HAPROXY_STATS_PORT": stats_port,
        "HAPROXY_METRICS_PORT": metrics_port,
        # The Python proxy stays, for when HAProxy finds the router silent. Its usual ports may be another cluster's.
        "FALLBACK_PROXY_HTTP_PORT": http_port,
        "FALLBACK_PROXY_GRPC_PORT": grpc_port,
        "HAPROXY_NBTHREAD": "1",
        "HAPROXY_HARD_STOP_AFTER_S": _STREAM_S,
        "DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # nobody but this HAProxy has to learn that a router goes
    }
    for name, value in settings.items():
        environment.setdefault(f"RAY_SERVE_{name}", str(value))


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("", 0))
        return [listener.getsockname()[1] for listener in listeners]
