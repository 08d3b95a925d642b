"""The store that the control service uses, on top of a database that keeps it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace

from cluster.control import store
from cluster.control.store import (
    AuditEntry,
    Change,
    ConflictError,
    Kind,
    MissingError,
    Restore,
    Retention,
    RolloutRecord,
    Snapshot,
    StoreBackend,
    UnavailableError,
    VersionInfo,
)
from cluster.control.text_diff import unified_diff

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5  # how late another process's write may be seen


class ControlStore:
    """Owns the checks, the histories and the watches of a store; its backend owns the data.

    It remembers the newest snapshot that it has seen of each kind, so that a service can go on serving
    `last_known()` while the database is away; `current()` and all writes then raise UnavailableError.
    """

    def __init__(
        self, backend: StoreBackend, retention: Retention | None = None, poll_interval_s: float = POLL_INTERVAL_S
    ) -> None:
        self._backend = backend
        self._retention = retention or Retention()
        self._poll_interval_s = poll_interval_s
        self._last_known: dict[Kind, Snapshot] = {}
        self.away: UnavailableError | None = None  # why the last look of a watch failed; None: it did not
        self._written = asyncio.Event()  # set, and replaced by a new one, at each write of this process

    # --- documents ---

    async def current(self, kind: Kind) -> Snapshot | None:
        """The version in force; None before the first one."""
        snapshot = await self._backend.snapshot(kind, None)
        if snapshot is not None:
            self._remember(snapshot)
        return snapshot

    def last_known(self, kind: Kind) -> Snapshot | None:
        """The newest version that this process has read or written, from memory."""
        return self._last_known.get(kind)

    async def get(self, kind: Kind, version: int) -> Snapshot:
        """One version. Raises MissingError if it was never written or is no longer kept."""
        store.check_number("version", version, 1)
        snapshot = await self._backend.snapshot(kind, version)
        if snapshot is None:
            raise MissingError(f"{kind} has no version {version}, or keeps it no longer")
        return snapshot

    async def history(self, kind: Kind, limit: int = 20, before: int | None = None) -> tuple[VersionInfo, ...]:
        """Newest first; `before` continues an earlier page. Raises InvalidWriteError for a limit out of range."""
        store.check_page(limit, before)
        return await self._backend.history(kind, limit, before)

    async def put(self, kind: Kind, change: Change, expected_version: int, now: float) -> Snapshot:
        """Put a document in force. Raises InvalidWriteError, ConflictError (which names the current version)."""
        return await self._append(kind, change, expected_version, now, restores=None)

    async def rollback(self, kind: Kind, restore: Restore, expected_version: int, now: float) -> Snapshot:
        """Put an old version's text in force as a new version. Raises MissingError and what `put` raises."""
        old = await self.get(kind, restore.version)
        change = Change(old.text, restore.author, restore.reason)
        return await self._append(kind, change, expected_version, now, restores=restore.version)

    async def watch(self, kind: Kind, after_version: int, timeout_s: float) -> Snapshot | None:
        """Wait until the version in force is another than `after_version`; None if that takes too long.

        Wakes at once for a write of this process, within `poll_interval_s` for another's. While the database is away
        it keeps waiting.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._next(kind, after_version)
        except TimeoutError:
            return None

    # --- rollouts ---

    async def rollout(self, rollout_id: str) -> RolloutRecord:
        """Raises MissingError."""
        record = await self._backend.rollout(rollout_id)
        if record is None:
            raise MissingError(f"there is no rollout {rollout_id}")
        return record

    async def rollouts(self, limit: int = 20) -> tuple[RolloutRecord, ...]:
        """Those started last, newest first. Raises InvalidWriteError for a limit out of range."""
        store.check_page(limit)
        return await self._backend.rollouts(limit)

    async def unfinished_rollouts(self) -> tuple[RolloutRecord, ...]:
        """All that a control service has to carry on with, oldest first."""
        return await self._backend.unfinished_rollouts()

    async def put_rollout(self, record: RolloutRecord) -> None:
        """Write the state with the revision that follows the stored one (1: a new rollout).

        Raises InvalidWriteError, StoreFullError, or ConflictError, which names the stored revision.
        """
        store.check_name("rollout_id", record.rollout_id)
        store.check_text("state", record.state)
        store.check_number("revision", record.revision, 1)
        await self._backend.put_rollout(record, self._retention.rollouts)

    # --- audit ---

    async def append_audit(self, entry: AuditEntry) -> AuditEntry:
        """Write down what someone did; returns the entry with its sequence number. Raises InvalidWriteError."""
        names = {"actor": entry.actor, "action": entry.action, "target": entry.target, "outcome": entry.outcome}
        for field, name in names.items():
            store.check_name(field, name)
        store.check_remark("detail", entry.detail, store.MAX_DETAIL_CHARS)
        return replace(entry, sequence=await self._backend.append_audit(entry, self._retention.audit_entries))

    async def audit(self, limit: int = 20, before: int | None = None) -> tuple[AuditEntry, ...]:
        """Newest first; `before` continues an earlier page. Raises InvalidWriteError for a limit out of range."""
        store.check_page(limit, before)
        return await self._backend.audit(limit, before)

    async def close(self) -> None:
        await self._backend.close()

    # --- inside ---

    async def _append(
        self, kind: Kind, change: Change, expected_version: int, now: float, restores: int | None
    ) -> Snapshot:
        store.check_text("text", change.text)
        store.check_name("author", change.author)
        store.check_remark("reason", change.reason)
        previous = await self._backend.snapshot(kind, None)
        current = previous.version if previous else 0
        if current != expected_version:
            raise ConflictError(kind, expected_version, current)
        diff = await asyncio.to_thread(_diff, previous, change.text)
        digest = store.text_digest(change.text)
        info = VersionInfo(kind, current + 1, digest, change.author, change.reason, now, diff, restores)
        snapshot = Snapshot(info, change.text)
        await self._backend.append(snapshot, self._retention.versions)
        self._remember(snapshot)
        self._written.set()
        self._written = asyncio.Event()
        return snapshot

    async def _next(self, kind: Kind, after_version: int) -> Snapshot:
        while True:
            written = self._written
            snapshot = await self._changed(kind, after_version)
            if snapshot is not None:
                return snapshot
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_interval_s):  # wait_for of Python 3.11 may swallow a cancellation
                    await written.wait()

    async def _changed(self, kind: Kind, after_version: int) -> Snapshot | None:
        try:
            if await self._backend.version(kind) in (0, after_version):
                snapshot = None
            else:
                snapshot = await self.current(kind)
        except UnavailableError as error:
            self._is_away(error)
            return None
        self._is_back()
        return snapshot

    def _remember(self, snapshot: Snapshot) -> None:
        known = self._last_known.get(snapshot.info.kind)
        if known is None or known.version <= snapshot.version:
            self._last_known[snapshot.info.kind] = snapshot

    def _is_away(self, error: UnavailableError) -> None:
        if self.away is None:
            logger.warning("the control store is away; what was read last stays in force: %s", error)
        self.away = error

    def _is_back(self) -> None:
        if self.away is not None:
            logger.info("the control store is back")
        self.away = None


def _diff(previous: Snapshot | None, text: str) -> str:
    if previous is None:
        return unified_diff("", text, "nothing", "version 1")
    return unified_diff(previous.text, text, f"version {previous.version}", f"version {previous.version + 1}")
