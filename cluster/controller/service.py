"""The control service: keeps documents, checks them before they are kept, and hands them to every router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from cluster.control.access import SCHEMA as ACCESS_SCHEMA
from cluster.control.breakdown import Breakdown
from cluster.control.control_store import ControlStore
from cluster.control.document import DocumentError, PolicyDocument
from cluster.control.finished_request import FinishedRequest
from cluster.control.report import Report, report
from cluster.control.report_query import ReportQuery
from cluster.control.store import (
    AuditEntry,
    Change,
    Kind,
    Restore,
    Snapshot,
    StoreError,
    VersionInfo,
    text_digest,
)
from cluster.control.switch import SpeculationSwitch, as_yaml, switched
from cluster.controller.board import Board
from cluster.controller.checks import APPLICABLE, READABLE, Checks
from cluster.controller.errors import errors_of
from cluster.controller.policy_desk import MAX_TRIES, PolicyDesk
from cluster.controller.rollouts import Rollouts
from cluster.controller.routers import Routers
from cluster.messages.answer import ErrorKind, RequestError
from cluster.transport.control_backend import Acknowledgement, ControlStatus

WATCH_S = 30.0  # one wait for a new version
CANCEL_AGAIN_S = 0.5  # a database's client may swallow a cancellation
RequestListener = Callable[[Sequence[FinishedRequest]], None]


class ControlService:
    """Owns the store and what routers have been told: a ControlBackend and a RouterDesk. One event loop's.

    `default_policy` is version 0: what holds before the first document, and what the first switch changes. `clock` is
    seconds since 1970.
    """

    def __init__(self, store: ControlStore, default_policy: PolicyDocument, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._board = Board()
        self._routers = Routers()
        self._policy = PolicyDesk(store, self._board, default_policy, clock)
        self._breakdown = Breakdown(clock)
        self._tasks: list[asyncio.Task[None]] = []
        self.rollouts = Rollouts(store, self._policy, self._routers.has_any, clock)
        self.listeners: list[RequestListener] = [self.rollouts.take, self._breakdown.add]  # all finished requests

    async def start(self) -> None:
        """Follow the store from now on, whether or not it answers yet."""
        self._tasks = [asyncio.create_task(self._follow(kind), name=f"control-{kind}") for kind in Kind]
        self._tasks.append(asyncio.create_task(self.rollouts.run(), name="control-rollouts"))

    def set_default_policy(self, default_policy: PolicyDocument) -> None:
        """Let this one be version 0."""
        self._policy.default_policy = default_policy

    async def stop(self) -> None:
        while running := [task for task in self._tasks if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
        await self._store.close()

    # --- ControlBackend ----------------------------------------------------------------------------------------------

    async def get(self, kind: Kind, version: int | None = None) -> Snapshot:
        if version:
            return await errors_of(self._store.get(kind, version))
        snapshot = await errors_of(self._store.current(kind)) if version is None else None
        return snapshot or self._configured(kind)

    async def apply(self, kind: Kind, change: Change, expected_version: int | None = None) -> Snapshot:
        _check(APPLICABLE, kind, change.text)

        async def write(standing: Snapshot | None) -> Snapshot:
            version = _version(standing) if expected_version is None else expected_version
            return await self._store.put(kind, change, version, self._clock())

        return await errors_of(self._policy.write(kind, "apply", write, MAX_TRIES if expected_version is None else 1))

    async def roll_back(self, kind: Kind, restore: Restore) -> Snapshot:
        old = await self.get(kind, restore.version)
        _check(READABLE, kind, old.text)

        async def write(standing: Snapshot | None) -> Snapshot:
            if restore.version:
                return await self._store.rollback(kind, restore, _version(standing), self._clock())
            change = Change(old.text, restore.author, restore.reason or "rollback to 0")
            return await self._store.put(kind, change, _version(standing), self._clock())

        return await errors_of(self._policy.write(kind, "rollback", write))

    async def switch_speculation(self, switch: SpeculationSwitch, author: str, reason: str) -> Snapshot:
        return await errors_of(self._policy.edit("switch", lambda document: switched(document, switch), author, reason))

    async def history(self, kind: Kind, limit: int, before: int | None = None) -> tuple[VersionInfo, ...]:
        return await errors_of(self._store.history(kind, limit, before))

    async def audit(self, limit: int, before: int | None = None) -> tuple[AuditEntry, ...]:
        return await errors_of(self._store.audit(limit, before))

    async def status(self) -> ControlStatus:
        policy, access = self._board.version(Kind.POLICY), self._board.version(Kind.ACCESS)
        return ControlStatus(policy, access, self._routers.states(), await self._store_error())

    async def report(self, query: ReportQuery) -> Report:
        return report(self._breakdown, query.window, query.by)

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

    def _configured(self, kind: Kind) -> Snapshot:
        """Version 0 of a kind, which nobody has written."""
        is_policy = kind is Kind.POLICY
        text = as_yaml(self._policy.default_policy) if is_policy else f"schema: {ACCESS_SCHEMA}\n"
        return Snapshot(VersionInfo(kind, 0, text_digest(text), "configuration", "", 0.0, ""), text)

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


def _check(checks: Checks, kind: Kind, text: str) -> None:
    try:
        checks[kind](text)
    except DocumentError as error:
        raise RequestError(ErrorKind.INVALID, str(error), "text") from error


def _version(snapshot: Snapshot | None) -> int:
    return 0 if snapshot is None else snapshot.version
