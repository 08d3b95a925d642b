"""The draft pool: replicas that guess."""

from __future__ import annotations

from cluster.config import Device, ModelConfig
from cluster.router.replica_set import Pool
from cluster.runtime.factory import load_draft_engine
from cluster.runtime.threads import set_num_threads
from cluster.transport.draft_stream import DRAFT_PROTOCOL
from cluster.transport.hub import PoolHub
from deployments.pool_host import PoolHost
from deployments.ranks import RankActors


class DraftReplica:
    """One replica of a model's draft pool."""

    async def __init__(  # type: ignore[misc]  # Serve awaits constructors
        self, model: ModelConfig, device: Device
    ) -> None:
        if model.draft is None:
            raise ValueError(f"models.{model.name}.draft: not configured")
        set_num_threads(model.draft.num_threads)
        engine = load_draft_engine(model.draft, model.target.path, device, RankActors)
        hub = PoolHub(DRAFT_PROTOCOL)
        hub.bind(engine)
        engine.on_events = hub.publish
        self._host = await PoolHost.start(engine, hub, model.name, Pool.DRAFT, model.draft)

    def record_replica_metadata(self) -> dict[str, object]:
        return self._host.describe()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return self._host.autoscaling_stats()

    def check_health(self) -> None:
        self._host.check_health()

    async def __del__(self) -> None:
        await self._host.stop()
