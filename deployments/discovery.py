"""How a router finds pools and the control service: it asks every replica of a deployment for its metadata."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from cluster.router.replica_set import ReplicaInfo

DISCOVERY_TIMEOUT_S = 5.0


def discover_from(
    handles: Sequence[DeploymentHandle], timeout_s: float = DISCOVERY_TIMEOUT_S
) -> Callable[[], Awaitable[list[ReplicaInfo]]]:
    """A discovery function over the deployments behind `handles`. Replicas that do not answer in time are left out."""

    async def discover() -> list[ReplicaInfo]:
        answers = await asyncio.gather(*(_metadata_of(handle, timeout_s) for handle in handles))
        return [ReplicaInfo(**answer) for deployment in answers for answer in deployment]

    return discover


def control_address_from(
    handle: DeploymentHandle, timeout_s: float = DISCOVERY_TIMEOUT_S
) -> Callable[[], Awaitable[str | None]]:
    """A function that says where the control service is; None: not there."""

    async def discover() -> str | None:
        addresses = [answer["address"] for answer in await _metadata_of(handle, timeout_s)]
        return str(addresses[0]) if addresses else None

    return discover


async def _metadata_of(handle: DeploymentHandle, timeout_s: float) -> list[dict[str, Any]]:
    """What each replica of a deployment says of itself.

    Each has its own time: one on a node that has just been lost answers to nobody, until Ray notes the node's death.
    The response's public `results_async` would give nothing of anyone for want of that one.
    """
    response = handle.broadcast("record_replica_metadata")
    try:
        async with asyncio.timeout(timeout_s):
            asked = await response._fetch_replica_results_async()
    except (DeploymentUnavailableError, TimeoutError):
        return []
    answering = (asyncio.wait_for(one.get_async(), timeout_s) for one in asked)
    answers = await asyncio.gather(*answering, return_exceptions=True)
    return [answer for answer in answers if isinstance(answer, dict)]
