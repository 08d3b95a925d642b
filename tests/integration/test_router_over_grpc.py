"""The router and toy engines in their own threads, with real gRPC between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest

from cluster.config import ClusterConfig, ModelConfig, PoolConfig, SpeculationConfig
from cluster.messages.answer import TokenDelta
from cluster.messages.request import GenerateRequest
from cluster.router.observer import RequestFinished, RequestResumed, RoundFinished
from cluster.router.replica_set import Pool as PoolName
from cluster.router.replica_set import ReplicaInfo
from cluster.router.router import Router
from cluster.transport.draft_stream import DRAFT_PROTOCOL
from cluster.transport.hub import PoolHub
from cluster.transport.server import PoolServer
from cluster.transport.target_stream import TARGET_PROTOCOL
from tests.engines import Pool, draft_pool, target_pool
from tests.fakes import byte_tokenizer
from tests.toy_cluster import MODEL, STEADY, RecordingObserver, collect, request, right_output, tokens_of

pytestmark = pytest.mark.integration


@dataclass
class Replica:
    """An engine in its thread behind a port."""

    pool: Pool
    server: PoolServer[Any, Any]
    info: ReplicaInfo

    @classmethod
    async def start(cls, name: PoolName, number: int, pool: Pool, protocol: Any) -> Replica:
        hub = PoolHub[Any, Any](protocol)
        pool.engine.on_events = hub.publish
        hub.bind(pool.engine)
        server = PoolServer(hub)
        await server.start()
        pool.engine.start()
        return cls(pool, server, ReplicaInfo(f"{name}-{number}", server.address, MODEL, name))

    async def stop(self) -> None:
        await self.server.stop(grace_s=0.0)
        await asyncio.to_thread(self.pool.engine.stop)

    def is_free(self) -> bool:
        return self.pool.engine.stats().num_used_blocks == 0


@dataclass
class System:
    """A router and its replicas."""

    router: Router
    observer: RecordingObserver
    targets: list[Replica]
    drafts: list[Replica]

    def used(self, replicas: list[Replica]) -> Replica:
        return next((replica for replica in replicas if not replica.is_free()), replicas[0])

    async def kill(self, replicas: list[Replica]) -> None:
        """Stop the one of `replicas` that is in use, as a crash would: streams end, nobody says why."""
        victim = self.used(replicas)
        replicas.remove(victim)
        await victim.stop()

    def is_free(self) -> bool:
        return all(replica.is_free() for replica in (*self.targets, *self.drafts))

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - the engines' threads tell nobody when they are idle
                await asyncio.sleep(0.001)


@asynccontextmanager
async def system(num_targets: int, num_drafts: int, agreement: float = 0.8) -> AsyncIterator[System]:
    targets = [
        await Replica.start(PoolName.TARGET, number, target_pool(max_hold_s=0.05), TARGET_PROTOCOL)
        for number in range(num_targets)
    ]
    drafts = [
        await Replica.start(PoolName.DRAFT, number, draft_pool(agreement), DRAFT_PROTOCOL)
        for number in range(num_drafts)
    ]
    observer = RecordingObserver()

    async def discover() -> list[ReplicaInfo]:
        return [replica.info for replica in (*targets, *drafts)]

    pools = {"target": PoolConfig(path="toy", max_num_seqs=8, max_model_len=128), "draft": PoolConfig(path="toy")}
    config = ClusterConfig(
        models=(ModelConfig(name=MODEL, **pools),), speculation=SpeculationConfig(max_draft_tokens=4)
    )
    router = Router(config, {MODEL: byte_tokenizer()}, discover, observer, limits=STEADY)
    await router.start()
    try:
        yield System(router, observer, targets, drafts)
    finally:
        await router.stop()
        for replica in (*targets, *drafts):
            await replica.stop()


def many(count: int, max_tokens: int = 60) -> list[GenerateRequest]:
    return [
        request(f"r{n}", prompt=(n + 1, n + 2), max_tokens=max_tokens, seed=n, temperature=float(n % 2))
        for n in range(count)
    ]


async def test_concurrent_requests_get_their_outputs_and_leave_the_pools_empty() -> None:
    async with system(2, 1) as cluster:
        items = many(16)
        outputs = await asyncio.gather(*(collect(cluster.router, item) for item in items))
        assert [tokens_of(deltas) for deltas in outputs] == [right_output(item) for item in items]
        await cluster.until(cluster.is_free, 1.0)
        rounds = cluster.observer.of(RoundFinished)
        assert rounds
        assert median(done.round_trip_s - done.draft_time_s for done in rounds) < 0.5


async def test_the_pools_are_free_within_a_second_of_a_client_leaving() -> None:
    async with system(1, 1) as cluster:
        stream = cluster.router.generate(request(max_tokens=120))
        await anext(stream)
        await stream.aclose()
        await cluster.until(cluster.is_free, 1.0)


async def run_with_trouble(
    cluster: System, items: list[GenerateRequest], trouble: Callable[[], Any]
) -> list[list[TokenDelta]]:
    """Run the requests together; once each has had a delta, cause trouble."""
    waiting = len(items)

    async def run(item: GenerateRequest) -> list[TokenDelta]:
        nonlocal waiting
        deltas = []
        async for delta in cluster.router.generate(item):
            deltas.append(delta)
            if len(deltas) == 1:
                waiting -= 1
                if waiting == 0:
                    await trouble()
        return deltas

    return list(await asyncio.gather(*map(run, items)))


async def test_killing_the_draft_fails_nothing_and_changes_nothing() -> None:
    async with system(1, 1) as cluster:
        items = many(6, max_tokens=100)
        outputs = await run_with_trouble(cluster, items, lambda: cluster.kill(cluster.drafts))
        assert [tokens_of(deltas) for deltas in outputs] == [right_output(item) for item in items]
        await cluster.until(cluster.is_free, 1.0)


async def test_killing_a_target_moves_its_requests_and_changes_nothing() -> None:
    async with system(2, 1) as cluster:
        items = many(6, max_tokens=100)
        outputs = await run_with_trouble(cluster, items, lambda: cluster.kill(cluster.targets))
        assert [tokens_of(deltas) for deltas in outputs] == [right_output(item) for item in items]
        assert cluster.observer.of(RequestResumed)
        assert all(event.outcome.value == "length" for event in cluster.observer.of(RequestFinished))
        await cluster.until(cluster.is_free, 1.0)
