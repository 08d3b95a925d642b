"""Rollouts on a live cluster with real requests: one that succeeds, one that fails by itself, one that cannot tell."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml

from load_tests.poisoned import MODEL, NGRAM, POISONED, POLICY, PROMPT, QUIET, poisoned_config, rollout_of
from protos.paceline.v1 import control_pb2, control_pb2_grpc
from tests.e2e.cluster import Cluster, serving, wait_until
from tests.e2e.test_control import AUTHORIZED, every_router_runs_what_is_in_force

pytestmark = pytest.mark.e2e

WINDOW_S = 12.0
MIN_SAMPLES = 10
ENDS = ("successful", "failed", "inconclusive")
NUM_CLIENTS = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("rollouts")
    (folder / "draft").mkdir()
    with serving(poisoned_config(folder / "draft"), folder) as running:
        (folder / "policy.yaml").write_text(POLICY)
        running.command("policy", "apply", str(folder / "policy.yaml"))
        wait_until(lambda: every_router_runs_what_is_in_force(running), 30, "the policy's arrival")
        yield running


@contextmanager
def traffic(cluster: Cluster, tenant: str) -> Iterator[None]:
    """Short requests of a few clients at a time, each in a cohort of its own, which all have to succeed."""
    over = threading.Event()

    def client() -> None:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
        with httpx.Client(base_url=cluster.url, headers={"x-paceline-tenant": tenant}, timeout=60) as http:
            while not over.is_set():
                http.post("/v1/completions", json=body).raise_for_status()

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(client) for _ in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            over.set()
        for done in clients:
            done.result()


def start(cluster: Cluster, folder: Path, text: str) -> str:
    """The new rollout's id."""
    (folder / "rollout.yaml").write_text(text)
    return cluster.command("rollout", "start", str(folder / "rollout.yaml"), "--reason", "a better draft").split()[1]


def status(cluster: Cluster, rollout_id: str) -> dict[str, Any]:
    answer = httpx.get(f"{cluster.url}/admin/v1/rollouts/{rollout_id}", headers=AUTHORIZED, timeout=10)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def reaches(cluster: Cluster, rollout_id: str, phase: str, timeout_s: float) -> dict[str, Any]:
    """The rollout once it is in a phase."""
    wait_until(lambda: status(cluster, rollout_id)["phase"] in ENDS, timeout_s, f"the rollout's being {phase}")
    ended = status(cluster, rollout_id)
    assert ended["phase"] == phase, ended["why"]
    return ended


def percent(cluster: Cluster, rule: str) -> float:
    """What the policy in force says."""
    rules = yaml.safe_load(cluster.command("policy", "get"))["rules"]
    return next(float(item.get("percent", 100)) for item in rules if item["id"] == rule)


def test_a_good_drafter_is_rolled_out_though_control_is_killed_on_the_way(cluster: Cluster, tmp_path: Path) -> None:
    with traffic(cluster, NGRAM):
        rollout_id = start(cluster, tmp_path, rollout_of(NGRAM, WINDOW_S, 1, MIN_SAMPLES))
        wait_until(lambda: (status(cluster, rollout_id)["num_canary"] or 0) > 0, 30, "a measurement")
        before = status(cluster, rollout_id)
        cluster.kill_replica("control")
        wait_until(lambda: status(cluster, rollout_id)["revision"] > before["revision"], 60, "a successor")
        resumed = status(cluster, rollout_id)
        assert (resumed["step_index"], resumed["percent"], resumed["phase"]) == (1, 50.0, "running")
        assert resumed["since"] > before["since"], "what the dead one has measured is measured afresh"
        ended = reaches(cluster, rollout_id, "successful", 3 * WINDOW_S)
    assert percent(cluster, NGRAM) == 100.0
    assert {result["verdict"] for result in ended["results"]} == {"pass"}


def test_a_poisoned_draft_is_at_0_percent_within_one_analysis(cluster: Cluster, tmp_path: Path) -> None:
    with traffic(cluster, POISONED):
        rollout_id = start(cluster, tmp_path, rollout_of(POISONED, WINDOW_S, 4, MIN_SAMPLES))
        ended = reaches(cluster, rollout_id, "failed", 2 * WINDOW_S)
    began, failed = (next(e for e in ended["events"] if e["step_index"] == 1), ended["events"][-1])
    assert failed["at"] - began["at"] <= WINDOW_S + 1.0
    assert "acceptance_length" in ended["why"]
    assert (ended["percent"], ended["is_pending"], percent(cluster, POISONED)) == (0.0, False, 0.0)
    assert "acceptance_length" in cluster.command("rollout", "status", rollout_id, "--watch")


def test_without_enough_requests_it_holds(cluster: Cluster, tmp_path: Path) -> None:
    rollout_id = start(cluster, tmp_path, rollout_of(QUIET, 1.0, 1, MIN_SAMPLES))
    held = reaches(cluster, rollout_id, "inconclusive", 30)
    assert f"0 canary and 0 control samples, {MIN_SAMPLES} needed" in held["why"]
    assert (held["step_index"], percent(cluster, QUIET)) == (1, 50.0)
    assert "aborted at 0 %" in cluster.command("rollout", "abort", rollout_id, "--reason", "no traffic")
    assert percent(cluster, QUIET) == 0.0
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        request = control_pb2.GetRolloutRequest(rollout_id=rollout_id)
        told = stub.GetRollout(request, metadata=tuple(AUTHORIZED.items()), timeout=30)
        assert (told.phase, told.events[-1].percent) == ("aborted", 0.0)
