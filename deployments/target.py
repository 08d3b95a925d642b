"""The target pool: replicas that own the committed tokens."""

from __future__ import annotations

from cluster.config import Device, ModelConfig, SpeculationConfig
from cluster.router.replica_set import Pool
from cluster.runtime.factory import load_engine
from cluster.runtime.threads import set_num_threads
from cluster.transport.hub import PoolHub
from cluster.transport.target_stream import TARGET_PROTOCOL
from deployments.pool_host import PoolHost
from deployments.ranks import RankActors


class TargetReplica:
    """One replica of a model's target pool."""

    async def __init__(  # type: ignore[misc]  # Serve awaits constructors
        self, model: ModelConfig, speculation: SpeculationConfig, device: Device
    ) -> None:
        set_num_threads(model.target.num_threads)
        engine = load_engine(model.target, speculation, device, RankActors)
        hub = PoolHub(TARGET_PROTOCOL)
        hub.bind(engine)
        engine.on_events = hub.publish
        self._host = await PoolHost.start(engine, hub, model.name, Pool.TARGET, model.target, engine.max_model_len)

    def record_replica_metadata(self) -> dict[str, object]:
        return self._host.describe()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return self._host.autoscaling_stats()

    def check_health(self) -> None:
        self._host.check_health()

    async def __del__(self) -> None:
        await self._host.stop()
