"""A router and both demo models in one process, over gRPC: every round that the marks tell of is complete."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ClusterConfig, DType, ModelConfig, PoolConfig, SpeculationConfig
from cluster.messages.request import DraftLengthMode, HoldMode
from cluster.router.observer import NullObserver
from cluster.router.replica_set import Pool, ReplicaInfo
from cluster.router.router import Router
from cluster.runtime.factory import load_draft_engine, load_engine
from cluster.tracing.marks import TraceLog
from cluster.tracing.taps import DRAFT_PLACES, TARGET_PLACES, PoolPlaces, trace_connectors, trace_pool
from cluster.transport.draft_stream import DRAFT_PROTOCOL
from cluster.transport.hub import PoolHub
from cluster.transport.server import PoolServer
from cluster.transport.target_stream import TARGET_PROTOCOL
from load_tests.round_trace import NAMES, join
from tests.fakes import byte_tokenizer
from tests.toy_cluster import MODEL, STEADY, collect, request, tokens_of

pytestmark = pytest.mark.integration

RARE = {"draft: guesses kept, no step", "draft: plan the next step"}  # a chain makes the whole block in one step


async def test_every_round_of_a_traced_request_is_complete(demo_model_dir: Path, demo_draft_dir: Path) -> None:
    common: dict[str, Any] = {"dtype": DType.BFLOAT16, "kv_blocks": 16, "num_threads": 1, "max_model_len": 128}
    model = ModelConfig(
        name=MODEL,
        target=PoolConfig(path=str(demo_model_dir), **common),
        draft=PoolConfig(path=str(demo_draft_dir), **common),
    )
    config = ClusterConfig(
        models=(model,),
        speculation=SpeculationConfig(
            max_draft_tokens=3, draft_length=DraftLengthMode.FIXED, hold=HoldMode.DEADLINE, max_hold_ms=10_000
        ),
    )
    assert model.draft is not None
    target = load_engine(model.target, config.speculation, config.device)
    draft = load_draft_engine(model.draft, model.target.path, config.device)
    log = TraceLog()
    async with AsyncExitStack() as stack:
        replicas = [
            await serve(stack, target, TARGET_PROTOCOL, Pool.TARGET, TARGET_PLACES, log),
            await serve(stack, draft, DRAFT_PROTOCOL, Pool.DRAFT, DRAFT_PLACES, log),
        ]

        async def discover() -> list[ReplicaInfo]:
            return replicas

        router = Router(
            config,
            {MODEL: byte_tokenizer()},
            discover,
            NullObserver(),
            connectors=trace_connectors(log),
            limits=STEADY,
        )
        await router.start()
        stack.push_async_callback(router.stop)
        deltas = await collect(router, request(max_tokens=24))
    trace = join(log.marks())
    assert len(tokens_of(deltas)) == 24
    assert set(trace.left_out) <= {"no next commit"}, "the last one"
    assert len(trace.rounds) >= 24 // 4 - 1, "a round commits up to 4 tokens"
    assert {name for item in trace.rounds for name in item.by_name()} >= set(NAMES.values()) - RARE
    assert all(0 < item.outside_forwards < 1 for item in trace.rounds)


async def serve(
    stack: AsyncExitStack, engine: Any, protocol: Any, pool: Pool, places: PoolPlaces, log: TraceLog
) -> ReplicaInfo:
    hub = PoolHub[Any, Any](protocol)
    hub.bind(engine)
    engine.on_events = hub.publish
    trace_pool(engine, hub, places, log)
    engine.start()
    stack.callback(engine.stop)
    server = PoolServer(hub)
    await server.start()
    stack.push_async_callback(server.stop)
    return ReplicaInfo(pool.value, server.address, MODEL, pool)
