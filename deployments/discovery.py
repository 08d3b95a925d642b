"""How a router finds pool replicas: it asks every replica of a pool's deployment for its metadata."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from cluster.router.replica_set import ReplicaInfo

DISCOVERY_TIMEOUT_S = 5.0


def discover_from(handles: Sequence[DeploymentHandle]) -> Callable[[], Awaitable[list[ReplicaInfo]]]:
    """A discovery function over the deployments behind `handles`. Replicas that do not answer are left out."""

    async def discover() -> list[ReplicaInfo]:
        return [info for handle in handles for info in await _replicas_of(handle)]

    return discover


async def _replicas_of(handle: DeploymentHandle) -> list[ReplicaInfo]:
    response = handle.broadcast("record_replica_metadata")
    try:
        answers = await response.results_async(timeout_s=DISCOVERY_TIMEOUT_S, return_exceptions=True)
    except (DeploymentUnavailableError, TimeoutError):
        return []
    return [ReplicaInfo(**answer) for answer in answers if isinstance(answer, dict)]
