"""Lets requests through to the target pool: a bounded queue per tenant, and the next free slot to whoever has least."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.messages.answer import ErrorKind, RequestError

_SERVICE_TIME_WEIGHT = 0.1  # of the latest request in the running mean


@dataclass(slots=True)
class _Tenant:
    """One tenant's requests: running, and waiting in order of arrival."""

    num_running: int = 0
    last_served: int = 0  # turn number, so that equals take turns
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Admission:
    """Owns the slots of one model's target pool and every tenant's queue for them.

    A tenant may use every slot while nobody else wants one. When a slot falls free, it goes to the waiting tenant that
    runs the fewest requests, so a flood of one tenant costs another at most one request's time. A tenant is forgotten
    as soon as it has nothing here, so state is bounded by the requests in flight.
    """

    def __init__(self, num_slots: Callable[[], int], max_queued_per_tenant: int, max_tenants: int) -> None:
        self._num_slots = num_slots
        self._max_queued = max_queued_per_tenant
        self._max_tenants = max_tenants
        self._tenants: dict[str, _Tenant] = {}
        self._num_running = 0
        self._turn = 0
        self._mean_service_s = 1.0

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self._num_running

    @property
    def num_queued(self) -> int:
        """Requests that wait for one."""
        return sum(len(tenant.waiting) for tenant in self._tenants.values())

    @property
    def num_tenants(self) -> int:
        """Tenants with a request here."""
        return len(self._tenants)

    async def acquire(self, tenant_name: str) -> None:
        """Wait for a slot; give it back with release(). Raises RequestError(OVERLOADED) when the queue is full.

        Cancelling the wait leaves the queue.
        """
        tenant = self._tenant(tenant_name)
        if not tenant.waiting and self._num_running < self._num_slots():
            self._start(tenant)
            return
        if len(tenant.waiting) >= self._max_queued:
            raise self._overloaded(f"tenant {tenant_name!r} has {self._max_queued} requests queued already", tenant)
        await self._wait(tenant_name, tenant)

    def release(self, tenant_name: str, service_s: float) -> None:
        """Give a slot back after service_s seconds; the next request starts in this call."""
        self._mean_service_s += _SERVICE_TIME_WEIGHT * (service_s - self._mean_service_s)
        self._stop(tenant_name)
        self.fill()

    def fill(self) -> None:
        """Start what waits while there are free slots: after a release, or when the pool has grown."""
        while self._num_running < self._num_slots() and (tenant := self._next()) is not None:
            turn = tenant.waiting.popleft()
            if not turn.cancelled():  # else its caller has left, and will say so in the loop's next turn
                self._start(tenant)
                turn.set_result(None)

    async def _wait(self, tenant_name: str, tenant: _Tenant) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tenant.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # started, and cancelled before it ran
                self._stop(tenant_name)
                self.fill()
            elif turn in tenant.waiting:
                tenant.waiting.remove(turn)
            self._forget_if_empty(tenant_name)
            raise

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= self._max_tenants:
                raise self._overloaded(f"{self._max_tenants} tenants have requests in flight already", _Tenant())
            tenant = self._tenants[name] = _Tenant()
        return tenant

    def _next(self) -> _Tenant | None:
        waiting = (tenant for tenant in self._tenants.values() if tenant.waiting)
        return min(waiting, key=lambda tenant: (tenant.num_running, tenant.last_served), default=None)

    def _start(self, tenant: _Tenant) -> None:
        self._turn += 1
        self._num_running += 1
        tenant.num_running += 1
        tenant.last_served = self._turn

    def _stop(self, tenant_name: str) -> None:
        self._num_running -= 1
        self._tenants[tenant_name].num_running -= 1
        self._forget_if_empty(tenant_name)

    def _forget_if_empty(self, tenant_name: str) -> None:
        tenant = self._tenants.get(tenant_name)
        if tenant is not None and not tenant.num_running and not tenant.waiting:
            del self._tenants[tenant_name]

    def _overloaded(self, message: str, tenant: _Tenant) -> RequestError:
        share = max(1, self._num_slots() // max(1, len(self._tenants)))
        wait_s = self._mean_service_s * (1 + len(tenant.waiting) / share)
        return RequestError(ErrorKind.OVERLOADED, message, retry_after_s=float(min(60, math.ceil(wait_s))))


class PoolGuard:
    """Ends a wait for a slot early when the pool has been found down at the end of `patience_s` seconds.

    A broken stream is back sooner than that; a pool that has to be started again is not worth queueing for.
    """

    def __init__(self, wait: asyncio.Timeout, is_up: Callable[[], bool], patience_s: float) -> None:
        self._wait = wait
        self._is_up = is_up
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(patience_s, self._check)

    def __enter__(self) -> None:
        """Already watching."""

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        if self._is_up():
            self._timer = self._loop.call_later(self._patience_s, self._check)
        elif not self._wait.expired():
            self._wait.reschedule(self._loop.time())
