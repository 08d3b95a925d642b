"""What every pool replica runs beside its engine: the stream server that routers connect to, and its metrics."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Generic

import ray
from prometheus_client import CollectorRegistry

from cluster.config import PoolConfig
from cluster.core.scaling import LoadMeter
from cluster.metrics.pool import PoolMetrics
from cluster.metrics.serving import serve_metrics
from cluster.router.replica_set import Pool, ReplicaInfo
from cluster.runtime.engine_loop import EngineLoop
from cluster.tracing.marks import TraceFile, trace_file
from cluster.tracing.taps import DRAFT_PLACES, TARGET_PLACES, trace_pool
from cluster.transport.hub import PoolHub
from cluster.transport.protocol import CommandT, EventT
from cluster.transport.server import PoolServer
from deployments.metrics_port import metrics_port

DRAIN_TIMEOUT_S = 20.0  # below Serve's graceful_shutdown_timeout_s


@dataclass(frozen=True, slots=True)
class PoolHost(Generic[CommandT, EventT]):
    """An engine that serves: owns its thread, its port for routers and its metrics endpoint."""

    engine: EngineLoop[CommandT, EventT]
    server: PoolServer[CommandT, EventT]
    info: ReplicaInfo
    meter: LoadMeter
    resources: ExitStack
    trace: TraceFile | None

    @classmethod
    async def start(
        cls,
        engine: EngineLoop[CommandT, EventT],
        hub: PoolHub[CommandT, EventT],
        model: str,
        pool: Pool,
        settings: PoolConfig,
        max_model_len: int | None = None,
    ) -> PoolHost[CommandT, EventT]:
        """Serve `engine`, which `hub` is bound to, on a free port of this node and on the running event loop."""
        registry = CollectorRegistry()
        engine.on_step = PoolMetrics(registry, model, pool.value, engine.stats).observe_step
        trace = trace_file(pool.value)
        if trace is not None:
            trace_pool(engine, hub, TARGET_PLACES if pool is Pool.TARGET else DRAFT_PLACES, trace.log)
        engine.start()
        host = ray.util.get_node_ip_address()
        server = PoolServer(hub, host)
        await server.start()
        replica_id = ray.get_runtime_context().get_actor_id()
        resources = ExitStack()
        metrics_address = resources.enter_context(serve_metrics(registry, host, metrics_port()))
        info = ReplicaInfo(
            replica_id, server.address, model, pool, metrics_address, max_model_len, settings.version_name
        )
        return cls(engine, server, info, LoadMeter(settings.max_num_seqs), resources, trace)

    def describe(self) -> dict[str, object]:
        """The replica's metadata: how a router finds it, and what it takes."""
        return asdict(self.info)

    def autoscaling_stats(self) -> dict[str, float]:
        """What the number of replicas goes by, since the last call."""
        return asdict(self.meter.read(self.engine.stats()))

    def check_health(self) -> None:
        """Raises EngineError when the engine cannot serve any more, so that Serve replaces the replica."""
        self.engine.check_health()

    async def stop(self) -> None:
        """Refuse what is new, finish what runs, then end every stream."""
        await asyncio.to_thread(self.engine.drain, DRAIN_TIMEOUT_S)
        await self.server.stop()
        await asyncio.to_thread(self.engine.stop)
        await asyncio.to_thread(self.resources.close)
        if self.trace is not None:
            await asyncio.to_thread(self.trace.write)
