"""A real `paceline serve` in a process of its own, and what tests ask of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from load_tests.bench import free_port

MODEL = "smollm2-135m"
START_TIMEOUT_S = 180.0
ENVIRONMENT = os.environ | {"PACELINE_ADMIN_TOKEN": "the-admin-token"}


@dataclass(frozen=True)
class Cluster:
    """A serving cluster's addresses."""

    http_port: int
    grpc_port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def status(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/status", timeout=10).raise_for_status().json()

    def replicas(self, pool: str) -> list[dict[str, Any]]:
        return [replica for replica in self.status()["replicas"] if replica["pool"] == pool]

    def is_idle(self) -> bool:
        """Nothing in flight, and every block of every pool free, as the pools themselves say."""
        samples = self.pool_samples()
        busy = ("paceline_kv_cache_usage_ratio", "paceline_num_requests_running", "paceline_num_requests_waiting")
        return self.status()["models"][0]["num_requests"] == 0 and not any(samples[name] for name in busy)

    def pool_samples(self) -> dict[str, float]:
        """Sums over both pools' own metrics endpoints, found as Prometheus would find them."""
        totals: dict[str, float] = {}
        for group in httpx.get(f"{self.url}/sd/prometheus", timeout=10).json():
            for target in group["targets"]:
                text = httpx.get(f"http://{target}/metrics", timeout=10).text
                for family in text_string_to_metric_families(text):
                    for sample in family.samples:
                        totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    def router_metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=10).raise_for_status().text

    def command(self, *arguments: str) -> str:
        """What a `paceline` command against this cluster prints. Raises CalledProcessError if it fails."""
        command = [str(Path(sys.executable).with_name("paceline")), *arguments, "--url", self.url]
        return subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True, timeout=60).stdout

    def kill_replica(self, deployment: str) -> None:
        """kill -9 the only replica of a deployment."""
        (pid,) = replica_pids(deployment, self.pid)
        os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str, every_s: float = 0.02) -> float:
    """Seconds until the condition held, looked at every_s. Raises AssertionError when it does not in time."""
    began = time.monotonic()
    while True:
        try:
            if condition():
                return time.monotonic() - began
        except (httpx.HTTPError, KeyError):  # a replica has just died or is not there yet
            pass
        if time.monotonic() - began > timeout_s:
            raise AssertionError(f"{what} did not happen within {timeout_s:g} s")
        time.sleep(every_s)


def replica_pids(deployment: str, ancestor: int) -> list[int]:
    """Processes of a deployment's replicas in the cluster that `ancestor` started."""
    wanted = f"ray::ServeReplica:paceline:{deployment}"
    until = time.monotonic() + 5  # Ray changes a process's title for moments, while it runs a method
    while True:
        titles = [(int(path.name), _title(path)) for path in Path("/proc").iterdir() if path.name.isdigit()]
        found = [pid for pid, title in titles if title.startswith(wanted) and ancestor in _session(pid)]
        if found or time.monotonic() > until:
            return found
        time.sleep(0.05)


def rank_pids(ancestor: int) -> list[int]:
    """Processes of tensor-parallel ranks other than 0 in the cluster that `ancestor` started."""
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    ranks = [pid for pid in found if _title(Path(f"/proc/{pid}")).startswith("ray::RankActor")]
    return [pid for pid in ranks if ancestor in _session(pid)]


def _title(path: Path) -> str:
    try:
        return (path / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip().split(" ")[0]
    except OSError:
        return ""


def _session(pid: int) -> set[int]:
    """A process and all of its ancestors."""
    chain = {pid}
    while pid > 1:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        pid = int(fields[1])
        chain.add(pid)
    return chain


@contextmanager
def serving(config: dict[str, Any], folder: Path) -> Iterator[Cluster]:
    """Run `paceline serve` on free ports until the context closes; its log is shown if it does not come up."""
    config["router"] = {**config.get("router", {}), "http_port": free_port(), "grpc_port": free_port()}
    config["control"] = {"store": f"sqlite://{folder}/control.db"}
    path, log = folder / "paceline.yaml", folder / "serve.log"
    path.write_text(yaml.safe_dump(config))
    with log.open("w") as output:
        command = [str(Path(sys.executable).with_name("paceline")), "serve", "--config", str(path)]
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=ENVIRONMENT
        )
    cluster = Cluster(config["router"]["http_port"], config["router"]["grpc_port"], process.pid)
    try:
        wait_until(lambda: _is_up(cluster, process, log), START_TIMEOUT_S, "the cluster's start")
        yield cluster
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=90)


def _is_up(cluster: Cluster, process: subprocess.Popen[bytes], log: Path) -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"paceline serve ended with {process.returncode}:\n{log.read_text()}")
    is_healthy = httpx.get(f"{cluster.url}/health", timeout=10).status_code == 200
    return is_healthy and len(cluster.replicas("draft")) == 1
