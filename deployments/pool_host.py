"""What every pool replica runs beside its engine: the stream server routers connect to, and its metrics."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import ray
from prometheus_client import CollectorRegistry

from cluster.metrics import PoolMetrics, serve_metrics
from cluster.router.replica_set import ReplicaInfo
from cluster.runtime.drafter import DraftEngine
from cluster.runtime.engine import Engine
from cluster.transport.server import PoolServer

DRAIN_TIMEOUT_S = 20.0  # below Serve's graceful_shutdown_timeout_s


@dataclass(frozen=True, slots=True)
class PoolHost:
    """An engine that is serving: owns its thread, its gRPC server and its metrics endpoint."""

    engine: Engine | DraftEngine
    server: PoolServer[Any, Any]
    info: ReplicaInfo

    @classmethod
    async def start(cls, engine: Engine | DraftEngine, server: PoolServer[Any, Any], model: str, pool: str) -> PoolHost:
        """Serve `engine` to routers on a free port of this node."""
        registry = CollectorRegistry()
        metrics = PoolMetrics(registry, model, pool, engine.stats)
        engine.on_step = metrics.observe_step
        host = ray.util.get_node_ip_address()
        address = await server.start(host)
        engine.start()
        info = ReplicaInfo(
            replica_id=ray.get_runtime_context().get_actor_id() or address,
            address=address,
            model=model,
            pool=pool,
            metrics_address=serve_metrics(registry, host),
        )
        return cls(engine, server, info)

    def describe(self) -> dict[str, str]:
        """The replica's metadata: how a router finds it."""
        return asdict(self.info)

    def check_health(self) -> None:
        """Raises when the engine's thread has died, so that Serve replaces the replica."""
        self.engine.check_health()

    async def stop(self) -> None:
        """Finish what runs, refuse what is new, then close every stream."""
        await self.server.stop(drain_timeout_s=DRAIN_TIMEOUT_S)
        self.engine.stop()
