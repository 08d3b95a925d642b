"""The settings of one machine's proxy: another cluster's are others, an operator's stand, and none is left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deployments.ingress_proxy import haproxy_settings


def test_two_clusters_on_one_machine_share_no_file_and_no_port() -> None:
    first: dict[str, str] = {}
    second: dict[str, str] = {}
    with haproxy_settings(first), haproxy_settings(second):
        own = [name for name in first if name.endswith(("_LOC", "_PATH", "_BASE", "_FILE", "_PORT"))]
        assert len(own) == 13
        assert all(first[name] != second[name] for name in own)
        ports = [value for name, value in first.items() if name.endswith("_PORT")]
        assert len(set(ports)) == 8
        assert max(map(int, ports)) < 30_000, "where no outgoing connection gets one between now and the start"
        assert not router_ports(first) & router_ports(second)
    assert not first
    assert not second


def router_ports(settings: dict[str, str]) -> set[int]:
    """What Ray Serve may choose from for the routers' HTTP and gRPC servers; servers of gRPC would share a port."""
    http, grpc = (
        range(
            int(settings[f"RAY_SERVE_DIRECT_INGRESS_MIN_{protocol}_PORT"]),
            int(settings[f"RAY_SERVE_DIRECT_INGRESS_MAX_{protocol}_PORT"]) + 1,
        )
        for protocol in ("HTTP", "GRPC")
    )
    assert not set(http) & set(grpc)
    assert len(http) == len(grpc) == 100
    return {*http, *grpc}


def test_what_an_operator_has_set_stands() -> None:
    environment = {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    with haproxy_settings(environment):
        assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert environment == {"RAY_SERVE_ENABLE_HA_PROXY": "0"}


def test_without_haproxy_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "/nowhere")
    environment: dict[str, str] = {}
    with haproxy_settings(environment):
        assert not environment


def test_every_setting_is_one_that_ray_serve_reads() -> None:
    from ray.serve._private import constants

    environment: dict[str, str] = {}
    with haproxy_settings(environment):
        assert all(hasattr(constants, name) for name in environment)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tell a process that its parent has died")
def test_haproxy_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    settings: dict[str, str] = {}
    with haproxy_settings(settings):
        config = tmp_path / "haproxy.cfg"
        timeouts = "".join(f"  timeout {kind} 1s\n" for kind in ("connect", "client", "server"))
        config.write_text(f"defaults\n  mode tcp\n{timeouts}listen it\n  bind unix@{tmp_path}/socket\n")
        code = (
            "import subprocess, sys; child = subprocess.Popen(sys.argv[1:]); print(child.pid, flush=True); child.wait()"
        )
        command = [sys.executable, "-c", code, settings["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(config)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            haproxy = os.pidfd_open(int(parent.stdout.readline()))
            _wait_for(tmp_path / "socket")
            parent.send_signal(signal.SIGKILL)
        assert _has_ended(haproxy, timeout_s=10)


def _wait_for(path: Path) -> None:
    """Until the file is there."""
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def _has_ended(pidfd: int, timeout_s: float) -> bool:
    try:
        return bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)
