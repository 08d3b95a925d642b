"""Who gets a slot next, who waits, and who is turned away."""

from __future__ import annotations

import asyncio

import pytest

from cluster.messages.answer import ErrorKind, RequestError
from cluster.router.admission import Admission

pytestmark = pytest.mark.unit


class Desk:
    """An admission with a number of slots that tests may change, and the order in which tenants got one."""

    def __init__(self, slots: int, max_queued: int = 10, max_tenants: int = 100) -> None:
        self.slots = slots
        self.started: list[str] = []
        self.admission = Admission(lambda: self.slots, max_queued, max_tenants)

    async def ask(self, tenant: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self._acquire(tenant))
        await asyncio.sleep(0)
        return task

    async def _acquire(self, tenant: str) -> None:
        await self.admission.acquire(tenant)
        self.started.append(tenant)

    async def release(self, tenant: str) -> None:
        self.admission.release(tenant, 0.1)
        await asyncio.sleep(0)


async def test_a_tenant_may_use_every_slot_that_nobody_else_wants() -> None:
    desk = Desk(3)
    for _ in range(3):
        await desk.ask("a")
    assert desk.started == ["a", "a", "a"]


async def test_the_next_slot_goes_to_whoever_runs_least() -> None:
    desk = Desk(2)
    for tenant in ("a", "a", "a", "a", "b", "c"):
        await desk.ask(tenant)
    assert desk.started == ["a", "a"]
    for tenant in ("a", "a"):
        await desk.release(tenant)
    assert desk.started == ["a", "a", "b", "c"]
    for tenant in ("b", "c"):
        await desk.release(tenant)
    assert desk.started[4:] == ["a", "a"]


async def test_equals_take_turns() -> None:
    desk = Desk(1)
    for tenant in ("a", "b", "a", "b"):
        await desk.ask(tenant)
    for tenant in ("a", "b", "a"):
        await desk.release(tenant)
    assert desk.started == ["a", "b", "a", "b"]


async def test_a_full_queue_is_refused_with_a_time_to_come_back() -> None:
    desk = Desk(1, max_queued=2)
    for _ in range(3):
        await desk.ask("a")
    with pytest.raises(RequestError) as failure:
        await desk.admission.acquire("a")
    assert failure.value.kind is ErrorKind.OVERLOADED
    assert failure.value.retry_after_s is not None
    assert failure.value.retry_after_s >= 1
    await desk.ask("b")  # another tenant's queue is its own
    assert desk.admission.num_queued == 3


async def test_tenants_are_bounded_and_forgotten_when_they_have_nothing_here() -> None:
    desk = Desk(5, max_tenants=2)
    await desk.ask("a")
    await desk.ask("b")
    with pytest.raises(RequestError):
        await desk.admission.acquire("c")
    await desk.release("a")
    await desk.ask("c")
    assert desk.started == ["a", "b", "c"]
    assert desk.admission.num_tenants == 2


async def test_leaving_the_queue_leaves_nothing_behind() -> None:
    desk = Desk(1)
    await desk.ask("a")
    waiting = await desk.ask("b")
    waiting.cancel()
    await asyncio.wait([waiting])
    assert (desk.admission.num_queued, desk.admission.num_tenants) == (0, 1)
    await desk.release("a")
    assert (desk.admission.num_running, desk.admission.num_tenants) == (0, 0)


async def test_a_slot_given_in_the_moment_of_leaving_goes_to_the_next() -> None:
    desk = Desk(1)
    await desk.ask("a")
    leaving = await desk.ask("b")
    await desk.ask("c")
    desk.admission.release("a", 0.1)  # b has the slot now, but has not run yet
    leaving.cancel()
    await asyncio.wait([leaving])
    await asyncio.sleep(0)
    assert desk.started == ["a", "c"]
    assert (desk.admission.num_running, desk.admission.num_tenants) == (1, 1)


async def test_a_pool_that_grows_starts_what_waits() -> None:
    desk = Desk(0)
    await desk.ask("a")
    await desk.ask("b")
    assert desk.started == []
    desk.slots = 2
    desk.admission.fill()
    await asyncio.sleep(0)
    assert desk.started == ["a", "b"]


async def test_a_slot_is_not_given_to_someone_who_is_just_leaving() -> None:
    desk = Desk(1)
    await desk.ask("a")
    leaving = await desk.ask("b")
    await desk.ask("b")
    leaving.cancel()
    desk.admission.release("a", 0.1)  # before the one who leaves has run
    await asyncio.wait([leaving])
    await asyncio.sleep(0)
    assert desk.started == ["a", "b"]
    assert (desk.admission.num_running, desk.admission.num_queued, desk.admission.num_tenants) == (1, 0, 1)
