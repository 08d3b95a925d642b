"""Where a whole cluster shares a machine's cores, its pools compute first."""

from __future__ import annotations

import sys

import psutil
import pytest

from tests.e2e.cluster import MODEL, Cluster, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(sys.platform != "linux", reason="niceness by thread is Linux's")]

POOLS = {f"ray::ServeReplica:paceline:{pool}-{MODEL}" for pool in ("target", "draft")}
OTHERS = {
    "ray::ServeReplica:paceline:router", "ray::ServeReplica:paceline:control", "ray::ServeController",
    "ray::ProxyActor", "ray::DashboardAgent", "gcs_server",
}  # fmt: skip


def least_and_most(cluster: Cluster) -> dict[str, tuple[int, int]]:
    """Niceness of the threads of each process of the cluster, by its title: the lowest and the highest."""
    found: dict[str, tuple[int, int]] = {}
    for process in psutil.Process(cluster.pid).children(recursive=True):
        try:
            threads = [psutil.Process(thread.id).nice() for thread in process.threads()]
            title = process.name().split(".")[0]
        except psutil.NoSuchProcess:
            continue
        found[title] = min(threads), max(threads)
    return found


def test_routers_and_what_ray_runs_beside_replicas_give_way_to_pools(cluster: Cluster) -> None:
    wait_until(lambda: least_and_most(cluster)["ray::ProxyActor"] == (15, 15), 30, "the cluster's start to be complete")
    found = least_and_most(cluster)
    assert {title: found[title] for title in POOLS} == dict.fromkeys(POOLS, (0, 0)), "those replaced meanwhile, too"
    assert {title: found[title] for title in OTHERS} == dict.fromkeys(OTHERS, (15, 15))
    assert found.get("haproxy", (15, 15)) == (15, 15), "where there is one"
    assert found["raylet"] == (0, 0)
