"""How a router finds pools and the control service: it asks every replica of a deployment for its metadata."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from cluster.router.replica_set import ReplicaInfo

DISCOVERY_TIMEOUT_S = 5.0


def discover_from(handles: Sequence[DeploymentHandle]) -> Callable[[], Awaitable[list[ReplicaInfo]]]:
    """A discovery function over the deployments behind `handles`. Replicas that do not answer are left out."""

    async def discover() -> list[ReplicaInfo]:
        return [info for handle in handles for info in await _replicas_of(handle)]

    return discover


def control_address_from(handle: DeploymentHandle) -> Callable[[], Awaitable[str | None]]:
    """A function that says where the control service is; None: not there."""

    async def discover() -> str | None:
        addresses = [answer["address"] for answer in await _metadata_of(handle)]
        return str(addresses[0]) if addresses else None

    return discover


async def _replicas_of(handle: DeploymentHandle) -> list[ReplicaInfo]:
    return [ReplicaInfo(**answer) for answer in await _metadata_of(handle)]


async def _metadata_of(handle: DeploymentHandle) -> list[dict[str, Any]]:
    """What each replica of a deployment says of itself; those that do not answer are left out."""
    response = handle.broadcast("record_replica_metadata")
    try:
        answers = await response.results_async(timeout_s=DISCOVERY_TIMEOUT_S, return_exceptions=True)
    except (DeploymentUnavailableError, TimeoutError):
        return []
    return [answer for answer in answers if isinstance(answer, dict)]
