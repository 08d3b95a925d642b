"""The control service: keeps documents, checks them before they are kept, and hands them to every router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from cluster.control.control_store import ControlStore
from cluster.control.document import DocumentError, PolicyDocument, parse_document
from cluster.control.finished_request import FinishedRequest
from cluster.control.store import (
    Change,
    ConflictError,
    InvalidWriteError,
    Kind,
    MissingError,
    Restore,
    Snapshot,
    StoreError,
    VersionInfo,
)
from cluster.control.switch import SpeculationSwitch, as_yaml, switched
from cluster.controller.board import Board
from cluster.controller.checks import CHECKS
from cluster.controller.routers import Routers
from cluster.messages import ErrorKind, RequestError
from cluster.transport.control_backend import Acknowledgement, ControlStatus

WATCH_S = 30.0  # one wait for a new version
MAX_TRIES = 5  # of a change to whatever stands, while others keep being first

Write = Callable[[Snapshot | None], Awaitable[Snapshot]]
RequestListener = Callable[[Sequence[FinishedRequest]], None]
Result = TypeVar("Result")


class ControlService:
    """Owns the store and what routers have been told: a ControlBackend and a RouterDesk. One event loop's.

    `default_policy` is what the first switch changes. `clock` is seconds since 1970.
    """

    def __init__(self, store: ControlStore, default_policy: PolicyDocument, clock: Callable[[], float]) -> None:
        self._store = store
        self._default_policy = default_policy
        self._clock = clock
        self._board = Board()
        self._routers = Routers()
        self._followers: list[asyncio.Task[None]] = []
        self.listeners: list[RequestListener] = []  # each hears of all finished requests

    async def start(self) -> None:
        """Follow the store from now on, whether or not it answers yet."""
        self._followers = [asyncio.create_task(self._follow(kind), name=f"control-{kind}") for kind in Kind]

    async def stop(self) -> None:
        for task in self._followers:
            task.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)
        await self._store.close()

    # --- ControlBackend ----------------------------------------------------------------------------------------------

    async def get(self, kind: Kind, version: int | None = None) -> Snapshot:
        if version is not None:
            return await _errors_of(self._store.get(kind, version))
        snapshot = await _errors_of(self._store.current(kind))
        if snapshot is None:
            raise RequestError(
                ErrorKind.NOT_FOUND, f"there is no {kind} document yet; the configuration's defaults hold"
            )
        return snapshot

    async def apply(self, kind: Kind, change: Change, expected_version: int | None = None) -> Snapshot:
        _check(kind, change.text)

        async def write(standing: Snapshot | None) -> Snapshot:
            version = _version(standing) if expected_version is None else expected_version
            return await self._store.put(kind, change, version, self._clock())

        return await self._write(kind, write, MAX_TRIES if expected_version is None else 1)

    async def roll_back(self, kind: Kind, restore: Restore) -> Snapshot:
        old = await _errors_of(self._store.get(kind, restore.version))
        _check(kind, old.text)

        async def write(standing: Snapshot | None) -> Snapshot:
            return await self._store.rollback(kind, restore, _version(standing), self._clock())

        return await self._write(kind, write)

    async def switch_speculation(self, switch: SpeculationSwitch, author: str, reason: str) -> Snapshot:
        async def write(standing: Snapshot | None) -> Snapshot:
            document = self._default_policy if standing is None else parse_document(standing.text)
            change = Change(as_yaml(switched(document, switch)), author, reason)
            return await self._store.put(Kind.POLICY, change, _version(standing), self._clock())

        return await self._write(Kind.POLICY, write)

    async def history(self, kind: Kind, limit: int, before: int | None = None) -> tuple[VersionInfo, ...]:
        return await _errors_of(self._store.history(kind, limit, before))

    async def status(self) -> ControlStatus:
        policy, access = self._board.version(Kind.POLICY), self._board.version(Kind.ACCESS)
        return ControlStatus(policy, access, self._routers.states(), await self._store_error())

    def watch(self, kind: Kind, after_version: int = 0) -> AsyncGenerator[Snapshot, None]:
        return self._board.follow({kind: after_version})

    # --- RouterDesk --------------------------------------------------------------------------------------------------

    async def documents(self, router_id: str) -> AsyncGenerator[Snapshot, None]:
        with self._routers.connected(router_id):
            async for snapshot in self._board.follow(dict.fromkeys(Kind, 0)):
                yield snapshot

    def now(self) -> float:
        return self._clock()

    def take_records(self, records: Sequence[FinishedRequest]) -> None:
        for listener in self.listeners:
            listener(records)

    def acknowledge(self, router_id: str, acknowledgement: Acknowledgement) -> None:
        self._routers.acknowledge(router_id, acknowledgement)

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _write(self, kind: Kind, write: Write, num_tries: int = MAX_TRIES) -> Snapshot:
        """Write on top of what stands, again if someone else is first; routers are told before this returns."""
        snapshot = await _errors_of(self._write_on_top(kind, write, num_tries))
        self._board.publish(snapshot)
        return snapshot

    async def _write_on_top(self, kind: Kind, write: Write, num_tries: int) -> Snapshot:
        while True:
            num_tries -= 1
            try:
                return await write(await self._store.current(kind))
            except ConflictError:
                if num_tries == 0:
                    raise

    async def _follow(self, kind: Kind) -> None:
        """Publish every version that this process or another one writes. While the store is away, this waits."""
        while True:
            snapshot = await self._store.watch(kind, self._board.version(kind), WATCH_S)
            if snapshot is not None:
                self._board.publish(snapshot)

    async def _store_error(self) -> str:
        try:
            await self._store.current(Kind.POLICY)
        except StoreError as error:
            return str(error)
        return ""


def _check(kind: Kind, text: str) -> None:
    try:
        CHECKS[kind](text)
    except DocumentError as error:
        raise RequestError(ErrorKind.INVALID, str(error), "text") from error


def _version(snapshot: Snapshot | None) -> int:
    return 0 if snapshot is None else snapshot.version


async def _errors_of(call: Awaitable[Result]) -> Result:
    """A store's errors, as the caller of a service sees them."""
    try:
        return await call
    except (InvalidWriteError, DocumentError) as error:
        raise RequestError(ErrorKind.INVALID, str(error)) from error
    except ConflictError as error:
        raise RequestError(ErrorKind.CONFLICT, str(error)) from error
    except MissingError as error:
        raise RequestError(ErrorKind.NOT_FOUND, str(error)) from error
    except StoreError as error:
        raise RequestError(ErrorKind.UNAVAILABLE, str(error), retry_after_s=1.0) from error
