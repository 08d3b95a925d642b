"""A Ray cluster of several nodes on this machine, each started as KubeRay starts a pod: by `ray start --block`.

Nodes have addresses of their own in 127.0.0.0/8, so that what listens on one is not reached by another's address.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from load_tests.bench import free_port
from tests.e2e.cluster import wait_until

START_TIMEOUT_S = 120.0
OBJECT_STORE_BYTES = 100 * 2**20
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)


@dataclass(frozen=True)
class NodeSpec:
    """What a node is started with: as much of a pod's specification as Ray sees."""

    name: str
    num_cpus: float
    labels: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Node:
    """A running node, and the ports of Serve's proxy on it."""

    ip: str
    http_port: int
    grpc_port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://{self.ip}:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"{self.ip}:{self.grpc_port}"

    def kill(self) -> None:
        """kill -9 the raylet, its workers and all else of the node, as when a machine is lost."""
        for pid in descendants(self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(timeout=30)


class RayNodes:
    """Owns the nodes and their folders. Nothing of them outlives this process, or `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._gcs_port, self._dashboard_port = free_port(), free_port()
        self._token = secrets.token_hex(32)
        self._nodes: list[Node] = []

    @property
    def serve_api(self) -> str:
        """Where a Serve configuration is put."""
        return f"http://127.0.0.1:{self._dashboard_port}/api/serve/applications/"

    @property
    def headers(self) -> dict[str, str]:
        """What Ray's API asks for."""
        return {"Authorization": f"Bearer {self._token}"}

    def start_head(self, spec: NodeSpec) -> Node:
        """The first node, with Ray's API answering."""
        ports = {"port": self._gcs_port, "dashboard-port": self._dashboard_port, "ray-client-server-port": free_port()}
        head = self._start(spec, ["--head", *_options(ports)])
        version = f"http://127.0.0.1:{self._dashboard_port}/api/version"
        wait_until(lambda: self._answers(head, version), START_TIMEOUT_S, "the start of Ray's API", every_s=0.2)
        return head

    def start_worker(self, spec: NodeSpec) -> Node:
        """Another node; it joins when it is up."""
        return self._start(spec, _options({"address": f"{self._nodes[0].ip}:{self._gcs_port}"}))

    def close(self) -> None:
        """Kill every node that is left."""
        for node in self._nodes:
            if node.process.poll() is None:
                node.kill()

    def logs(self) -> str:
        """The last words of every node."""
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(self._folder.glob("*.log")))

    def _start(self, spec: NodeSpec, options: list[str]) -> Node:
        index = len(self._nodes)
        ip, http_port, grpc_port = f"127.0.0.{index + 2}", free_port(), free_port()
        settings = {
            "node-ip-address": ip,
            "num-cpus": f"{spec.num_cpus:g}",
            "labels": ",".join(f"{name}={value}" for name, value in spec.labels.items()),
            "object-store-memory": OBJECT_STORE_BYTES,
            "dashboard-agent-listen-port": 0,
            "include-log-monitor": False,
            "temp-dir": self._folder / str(index),  # Ray's socket names of nodes that share one collide
        }
        command = [_ray(), "start", "--block", "--disable-usage-stats", *options, *_options(settings)]
        with (self._folder / f"{index}-{spec.name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                env=self._environment(spec, http_port, grpc_port),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_dying_with_parent(),
            )
        self._nodes.append(Node(ip, http_port, grpc_port, process))
        return self._nodes[-1]

    def _environment(self, spec: NodeSpec, http_port: int, grpc_port: int) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_ADMIN")}
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token}
        # On Kubernetes every proxy has the ports of the Serve configuration, on an address of its own. Here they all
        # listen on all addresses, and the kernel would hand a connection to any of them.
        own |= {"RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(http_port), "RAY_SERVE_WORKER_PROXY_GRPC_PORT": str(grpc_port)}
        return inherited | own | dict(spec.environment)

    def _answers(self, node: Node, url: str) -> bool:
        if node.process.poll() is not None:
            raise RuntimeError(f"a node has ended:\n{self.logs()}")
        return httpx.get(url, headers=self.headers, timeout=10).status_code == 200


@contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """An empty cluster, in a folder with a short name: it becomes part of socket names."""
    with tempfile.TemporaryDirectory(prefix="nodes-", ignore_cleanup_errors=True) as folder:
        nodes = RayNodes(Path(folder))
        try:
            yield nodes
        finally:
            nodes.close()


def descendants(pid: int) -> list[int]:
    """A process and all that it has started, and they in turn."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (parent := _parent(path)) is not None:
            children.setdefault(parent, []).append(int(path.name))
    found = [pid]
    for known in found:  # grows meanwhile
        found += children.get(known, [])
    return found


def _parent(process: Path) -> int | None:
    try:
        return int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None


def _ray() -> str:
    return str(Path(sys.executable).with_name("ray"))


def _options(values: Mapping[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def _dying_with_parent() -> Callable[[], None]:
    """For a child to call: it is told to end when this process has, however that came about."""
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
