"""How routers find replicas, whatever single replicas do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentID

from cluster.router.replica_set import Pool, ReplicaInfo
from deployments.discovery import control_address_from, discover_from

pytestmark = pytest.mark.unit

Answer = Callable[[], Awaitable[dict[str, Any]]]


class FakeResult:
    """One replica's answer."""

    def __init__(self, answer: Answer) -> None:
        self.get_async = answer


class FakeHandle:
    """A deployment whose replicas answer as scripted; without any, it is not there."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = answers

    def broadcast(self, method: str) -> FakeHandle:
        assert method == "record_replica_metadata"
        return self

    async def _fetch_replica_results_async(self) -> Sequence[FakeResult]:
        if not self._answers:
            raise DeploymentUnavailableError(DeploymentID("target", "paceline"))
        return [FakeResult(answer) for answer in self._answers]


def replica(replica_id: str, pool: Pool = Pool.TARGET) -> Answer:
    async def answer() -> dict[str, Any]:
        return {"replica_id": replica_id, "address": "10.0.0.1:1", "model": "demo", "pool": pool}

    return answer


async def silent() -> dict[str, Any]:
    """A replica whose node has just been lost."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


async def failing() -> dict[str, Any]:
    raise RuntimeError("actor died")


def names(infos: Sequence[ReplicaInfo]) -> list[str]:
    return [info.replica_id for info in infos]


@pytest.mark.parametrize("lost", [silent, failing])
async def test_a_replica_that_does_not_answer_hides_no_other_of_its_pool(lost: Answer) -> None:
    handle: Any = FakeHandle(replica("a"), lost, replica("b"))
    assert names(await discover_from([handle], timeout_s=0.05)()) == ["a", "b"]


async def test_a_pool_that_does_not_answer_hides_no_other_pool() -> None:
    handles: list[Any] = [FakeHandle(silent), FakeHandle(), FakeHandle(replica("d", Pool.DRAFT))]
    assert names(await discover_from(handles, timeout_s=0.05)()) == ["d"]


async def test_pools_are_asked_at_the_same_time() -> None:
    asked = asyncio.Event()

    async def first() -> dict[str, Any]:
        await asked.wait()
        return await replica("a")()

    async def second() -> dict[str, Any]:
        asked.set()
        return await replica("b")()

    handles: list[Any] = [FakeHandle(first), FakeHandle(second)]
    assert names(await discover_from(handles, timeout_s=5)()) == ["a", "b"]


@pytest.mark.parametrize(("answers", "address"), [((), None), ((silent,), None)])
async def test_a_control_service_that_does_not_answer_is_not_there(
    answers: tuple[Answer, ...], address: str | None
) -> None:
    handle: Any = FakeHandle(*answers)
    assert await control_address_from(handle, timeout_s=0.05)() is address
