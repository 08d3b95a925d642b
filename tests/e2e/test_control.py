"""Operators change what runs, on a live cluster, by the `paceline` command and over gRPC."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio
import httpx
import openai
import pytest
from openai import AsyncOpenAI

from protos.paceline.v1 import control_pb2, control_pb2_grpc
from tests.e2e.cluster import ENVIRONMENT, MODEL, Cluster, wait_until
from tests.e2e.test_failures import answers

pytestmark = pytest.mark.e2e

AUTHORIZED = {"authorization": f"Bearer {ENVIRONMENT['PACELINE_ADMIN_TOKEN']}"}


def control_status(cluster: Cluster) -> dict[str, Any]:
    answer: dict[str, Any] = (
        httpx.get(f"{cluster.url}/admin/v1/status", headers=AUTHORIZED, timeout=10).raise_for_status().json()
    )
    return answer


def every_router_runs_what_is_in_force(cluster: Cluster) -> bool:
    status = control_status(cluster)
    wanted = (status["policy_version"], status["access_version"])
    return status["routers"] != [] and all(
        (router["policy_version"], router["access_version"]) == wanted for router in status["routers"]
    )


@contextmanager
def policy_restored(cluster: Cluster) -> Iterator[None]:
    """Other tests find speculation as they expect it."""
    try:
        yield
    finally:
        cluster.command("speculation", "on")
        wait_until(lambda: every_router_runs_what_is_in_force(cluster), 30, "the policy's return")


async def ask(client: AsyncOpenAI, **options: Any) -> Any:
    return await client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4, seed=1, **options
    )


async def test_the_kill_switch_reaches_running_streams_and_changes_no_text(
    client: AsyncOpenAI, cluster: Cluster
) -> None:
    expected = await answers(client, None)
    started = asyncio.Event()
    with policy_restored(cluster):
        streams = asyncio.create_task(answers(client, "model", started))
        await started.wait()
        await asyncio.to_thread(cluster.command, "speculation", "off", "--reason", "an incident")
        assert await streams == expected
        raw = await ask(client)
        version = control_status(cluster)["policy_version"]
        assert raw.headers["x-paceline-variant"] == "off"
        assert raw.headers["x-paceline-policy-version"] == str(version)
        assert "killed" in cluster.command("policy", "explain")
        assert "an incident" in cluster.command("policy", "history")
    assert (await ask(client)).headers["x-paceline-variant"] == "default"


async def test_control_is_killed_and_comes_back_with_what_it_had(client: AsyncOpenAI, cluster: Cluster) -> None:
    with policy_restored(cluster):
        cluster.command("speculation", "off", "--tenant", "acme")
        version = control_status(cluster)["policy_version"]
        cluster.kill_replica("control")
        raw = await ask(client, extra_headers={"x-paceline-tenant": "acme"})
        assert raw.headers["x-paceline-policy-version"] == str(version)  # nobody waits for control
        wait_until(lambda: every_router_runs_what_is_in_force(cluster), 60, "control's return")
        assert control_status(cluster)["policy_version"] == version


async def test_with_the_first_key_every_request_needs_one_and_quotas_hold(
    client: AsyncOpenAI, cluster: Cluster
) -> None:
    key = cluster.command("keys", "create", "phone", "acme").split()[-1]
    try:
        wait_until(lambda: every_router_runs_what_is_in_force(cluster), 30, "the key's arrival")
        with pytest.raises(openai.AuthenticationError):
            await ask(client)
        mine = client.with_options(api_key=key)
        await ask(mine)
        cluster.command("quota", "--tenant", "acme", "--requests-per-minute", "2")
        wait_until(lambda: every_router_runs_what_is_in_force(cluster), 30, "the quota's arrival")
        with pytest.raises(openai.RateLimitError, match="2 requests per minute") as failure:
            [await ask(mine) for _ in range(4)]
        assert int(failure.value.response.headers["retry-after"]) <= 60
    finally:
        cluster.command("keys", "revoke", "phone", "--last")
    wait_until(lambda: every_router_runs_what_is_in_force(cluster), 30, "the key's end")
    await ask(client)


async def test_the_control_service_answers_over_the_public_grpc_port(cluster: Cluster) -> None:
    async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        metadata = tuple(AUTHORIZED.items())
        request = control_pb2.SwitchSpeculationRequest(enabled=False, tenant="globex", author="e2e", reason="test")
        switched = await stub.SwitchSpeculation(request, metadata=metadata, timeout=30)
        assert "globex" in switched.text
        watch = stub.Watch(control_pb2.WatchRequest(kind=control_pb2.DOCUMENT_KIND_POLICY), metadata=metadata)
        assert (await watch.read()).info.version == switched.info.version
        watch.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.GetStatus(control_pb2.GetStatusRequest(), timeout=30)
        assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED
    cluster.command("speculation", "on", "--tenant", "globex")


async def test_finished_requests_are_reported(client: AsyncOpenAI, cluster: Cluster) -> None:
    await ask(client, extra_headers={"x-paceline-tenant": "reported"})

    def rows() -> list[dict[str, Any]]:
        report = json.loads(cluster.command("report", "--by", "tenant,drafter", "--window", "1h", "--json"))
        return [row for row in report["rows"] if row["values"][0] == "reported"]

    wait_until(lambda: rows() != [], 30, "the request's arrival in the report")
    (row,) = rows()
    assert (row["requests"], row["error_rate"]) == (1, 0.0)
    assert row["acceptance_length"] >= 1
    assert "reported" in cluster.command("report", "--by", "tenant")


def test_a_bad_document_is_refused_with_the_path_and_the_last_one_stays(cluster: Cluster, tmp_path: Any) -> None:
    before = control_status(cluster)["policy_version"]
    bad = tmp_path / "bad.yaml"
    bad.write_text("schema: paceline.policy/v1\nrules: [{id: r, action: allow, percent: 101}]\n")
    with pytest.raises(subprocess.CalledProcessError) as failure:
        cluster.command("policy", "apply", str(bad))
    assert "rules[0].percent" in failure.value.stderr
    assert control_status(cluster)["policy_version"] == before
