"""The draft pool: replicas that guess."""

from __future__ import annotations

from ray import serve

from cluster.config import Device, ModelConfig
from cluster.runtime.factory import load_draft_engine
from cluster.transport.server import DraftServer
from deployments.pool_host import PoolHost


@serve.deployment(max_ongoing_requests=100, health_check_period_s=2, health_check_timeout_s=30)
class DraftReplica:
    """One replica of a model's draft pool."""

    async def __init__(self, model: ModelConfig, device: Device) -> None:
        if model.draft is None:
            raise ValueError(f"models.{model.name}.draft: not configured")
        engine = load_draft_engine(model.draft, model.target.path, device)
        self._host = await PoolHost.start(engine, DraftServer(engine), model.name, "draft")

    def record_replica_metadata(self) -> dict[str, str]:
        return self._host.describe()

    def check_health(self) -> None:
        self._host.check_health()

    async def __del__(self) -> None:
        await self._host.stop()
