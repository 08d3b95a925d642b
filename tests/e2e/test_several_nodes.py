"""The manifest's own Serve configuration on a cluster of several nodes, put there and changed as KubeRay does it.

Each pool has a node of its own. Clients come in through the router's node, as the Service of the manifests has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from openai import AsyncOpenAI

from cluster.config import load_config
from load_tests.bench import free_port
from protos.paceline.v1 import inference_pb2_grpc
from tests.e2e.cluster import MODEL, START_TIMEOUT_S, wait_until
from tests.e2e.ray_nodes import Node, RayNodes, ray_nodes
from tests.e2e.rendered import DEV, Overlay, rendered, scaled_down
from tests.e2e.test_failures import PROMPTS, answers
from tests.e2e.test_grpc_client import question
from tests.redis_server import running_redis

pytestmark = pytest.mark.e2e

Json = dict[str, Any]
CONFIG = DEV.parents[2] / "configs" / "dev.yaml"
TARGET, DRAFT = f"target-{MODEL}", f"draft-{MODEL}"
ADMIN_TOKEN = "the-admin-token"


@dataclass(frozen=True)
class Service:
    """The application on its nodes."""

    nodes: RayNodes
    overlay: Overlay
    workers: dict[str, Node]
    ports: tuple[int, int]

    def put(self, config: Json) -> None:
        """Give Serve a new goal, and wait until it is reached."""
        goal = scaled_down(config, *self.ports)
        httpx.put(self.nodes.serve_api, json=goal, headers=self.nodes.headers, timeout=60).raise_for_status()
        self.wait_until(lambda: self.application()["status"] == "RUNNING", "the application of the goal")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Look seldom: each look costs the controller or a pool something."""
        try:
            wait_until(condition, START_TIMEOUT_S, what, every_s=0.5)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.application()}\n{self.nodes.logs()}") from None

    def application(self) -> Json:
        answer = httpx.get(self.nodes.serve_api, headers=self.nodes.headers, timeout=30).raise_for_status().json()
        (application,) = answer["applications"].values()
        assert application["status"] != "DEPLOY_FAILED", application["message"]
        return dict(application)

    def replicas(self, deployment: str) -> list[Json]:
        """As Serve sees them: node_ip, actor_id, pid, …"""
        return [dict(one) for one in self.application()["deployments"][deployment]["replicas"]]

    def num_connected(self, pool: str) -> int:
        """Replicas of a pool that the router uses."""
        status = httpx.get(f"{self.workers['router'].url}/status", timeout=10).raise_for_status().json()
        return sum(one["pool"] == pool and one["load"] is not None for one in status["replicas"])

    def reason(self) -> str:
        """Of the policy's decision about a request now."""
        with grpc.insecure_channel(self.workers["router"].grpc_address) as channel:
            responses = list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(question(max_tokens=2)))
        return str(responses[-1].usage.policy.reason)

    def is_ready(self) -> bool:
        return httpx.get(f"{self.workers['router'].url}/ready", timeout=30).status_code == 200


@pytest.fixture(scope="module")
def service(demo_model_dir: Path) -> Iterator[Service]:
    with running_redis() as redis, ray_nodes() as nodes:
        secrets = {"admin-token": ADMIN_TOKEN, "store-url": redis.url}
        replaced = {"PACELINE_CACHE": str(demo_model_dir.parents[1]), "PACELINE_METRICS_PORT": str(free_port())}
        overlay = Overlay(DEV, secrets, replaced)
        nodes.start_head(overlay.head())
        workers = {name: nodes.start_worker(overlay.worker(name)) for name in ("router", "draft", "target")}
        running = Service(nodes, overlay, workers, (free_port(), free_port()))
        running.put(overlay.serve_config)
        running.wait_until(running.is_ready, "a generation")
        yield running


@pytest.fixture
async def client(service: Service) -> Any:
    url = f"{service.workers['router'].url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as openai:
        yield openai


def test_each_pool_runs_on_the_node_of_its_label(service: Service) -> None:
    places = {name: [one["node_ip"] for one in service.replicas(name)] for name in ("router", "control", DRAFT, TARGET)}
    router, draft, target = (service.workers[name].ip for name in ("router", "draft", "target"))
    assert places == {"router": [router], "control": [router], DRAFT: [draft], TARGET: [target]}
    assert len({service.replicas(name)[0]["node_id"] for name in ("router", DRAFT, TARGET)}) == 3


def test_metrics_and_administration_reach_other_nodes(service: Service) -> None:
    router = service.workers["router"].url
    addresses = [address for group in httpx.get(f"{router}/sd/prometheus").json() for address in group["targets"]]
    assert {address.split(":")[0] for address in addresses} == {
        service.workers[name].ip for name in ("draft", "target")
    }
    assert all("paceline_step_seconds" in httpx.get(f"http://{address}/metrics").text for address in addresses)
    authorized = {"authorization": f"Bearer {ADMIN_TOKEN}"}
    for node in service.workers.values():
        assert len(httpx.get(f"{node.url}/admin/v1/status", headers=authorized).json()["routers"]) == 1


async def test_the_proxy_of_every_node_generates_over_http_and_grpc(service: Service) -> None:
    for node in service.workers.values():
        async with AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0, timeout=120) as openai:
            (text,) = await answers(openai, "model", prompts=PROMPTS[:1], max_tokens=8)
        async with grpc.aio.insecure_channel(node.grpc_address) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(question(max_tokens=16))
            responses = [response async for response in call]
        assert text
        assert responses[-1].usage.completion_tokens == 16
        assert responses[-1].usage.num_accepted_tokens > 0  # the draft, on a node of its own, was of use


def test_policy_and_number_of_replicas_change_while_target_replicas_run_on(service: Service) -> None:
    (before,) = service.replicas(TARGET)
    config = load_config(CONFIG)
    off = config.model_copy(update={"speculation": config.speculation.model_copy(update={"enabled": False})})
    service.put(rendered(off))
    service.wait_until(lambda: service.reason() == "disabled", "the policy's change")
    service.workers["target 2"] = service.nodes.start_worker(service.overlay.worker("target"))
    (model,) = config.models
    more = model.model_copy(update={"target": model.target.model_copy(update={"replicas": 2})})
    service.put(rendered(config.model_copy(update={"models": (more,)})))
    service.wait_until(lambda: service.reason() == "default", "the policy's return")
    service.wait_until(lambda: service.num_connected("target") == 2, "the use of a second target replica")
    after = {one["actor_id"]: one for one in service.replicas(TARGET)}
    assert {one["node_ip"] for one in after.values()} == {service.workers[name].ip for name in ("target", "target 2")}
    assert after[before["actor_id"]]["pid"] == before["pid"]


async def test_a_lost_draft_node_fails_no_request_and_changes_no_text(service: Service, client: AsyncOpenAI) -> None:
    def ask(drafter: str | None, started: asyncio.Event | None = None) -> Awaitable[list[str]]:
        return answers(client, drafter, started, PROMPTS[:2], max_tokens=48)

    expected = await ask(None)
    started = asyncio.Event()
    streams = asyncio.ensure_future(ask("model", started))
    await started.wait()
    service.workers["draft"].kill()
    assert await streams == expected
    assert await ask("model") == expected  # nobody has noticed yet
    assert service.num_connected("target") == 2
