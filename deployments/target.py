"""The target pool: replicas that own the committed tokens."""

from __future__ import annotations

from ray import serve

from cluster.config import Device, ModelConfig, SpeculationConfig
from cluster.runtime.factory import load_engine
from cluster.transport.server import TargetServer
from deployments.pool_host import PoolHost


@serve.deployment(max_ongoing_requests=100, health_check_period_s=2, health_check_timeout_s=30)
class TargetReplica:
    """One replica of a model's target pool."""

    async def __init__(self, model: ModelConfig, speculation: SpeculationConfig, device: Device) -> None:
        engine = load_engine(model.target, speculation, device)
        self._host = await PoolHost.start(engine, TargetServer(engine), model.name, "target")

    def record_replica_metadata(self) -> dict[str, str]:
        return self._host.describe()

    def check_health(self) -> None:
        self._host.check_health()

    async def __del__(self) -> None:
        await self._host.stop()
