"""The embedded store: one SQLite file in WAL mode, safe under kill -9 and for several processes of one machine.

Every write is one immediate transaction that is on disk when it returns (`synchronous=FULL`). SQLite's calls run on a
thread of their own, so that the event loop never waits for the disk.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from cluster.control.store import (
    AuditEntry,
    ConflictError,
    Kind,
    RolloutRecord,
    Snapshot,
    StoreError,
    StoreFullError,
    UnavailableError,
    VersionInfo,
)

SCHEMA_VERSION = 1
_APPLICATION_ID = 0x50434C4E  # "PCLN": the file is ours
BUSY_TIMEOUT_S = 5.0  # how long a write waits for another process's

_SCHEMA = (
    """CREATE TABLE snapshots (
        kind TEXT NOT NULL, version INTEGER NOT NULL, digest TEXT NOT NULL, author TEXT NOT NULL, reason TEXT NOT NULL,
        written_at REAL NOT NULL, diff TEXT NOT NULL, restores INTEGER, text TEXT NOT NULL,
        PRIMARY KEY (kind, version)
    )""",
    """CREATE TABLE rollouts (
        started INTEGER PRIMARY KEY AUTOINCREMENT, rollout_id TEXT NOT NULL UNIQUE, revision INTEGER NOT NULL,
        state TEXT NOT NULL, finished INTEGER NOT NULL, updated_at REAL NOT NULL
    )""",
    """CREATE TABLE audit (
        sequence INTEGER PRIMARY KEY AUTOINCREMENT, actor TEXT NOT NULL, action TEXT NOT NULL, target TEXT NOT NULL,
        outcome TEXT NOT NULL, at REAL NOT NULL, detail TEXT NOT NULL
    )""",
)
_INFO = "kind, version, digest, author, reason, written_at, diff, restores"
_ROLLOUT = "rollout_id, revision, state, finished, updated_at"
_AUDIT = "actor, action, target, outcome, at, detail"
_NO_LIMIT = 2**62

T = TypeVar("T")


class SQLiteBackend:
    """Owns one connection and the thread that uses it."""

    def __init__(self, connection: sqlite3.Connection, executor: ThreadPoolExecutor) -> None:
        self._connection = connection
        self._executor = executor

    @classmethod
    async def open(cls, path: Path, busy_timeout_s: float = BUSY_TIMEOUT_S) -> Self:
        """Open or create the file. Raises StoreError if it is not a store, or one of a newer Paceline."""
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paceline-store")
        try:
            connection = await asyncio.get_running_loop().run_in_executor(executor, _open, path, busy_timeout_s)
        except BaseException:
            executor.shutdown(wait=False)
            raise
        return cls(connection, executor)

    async def close(self) -> None:
        await self._run(self._connection.close)
        self._executor.shutdown()

    # --- documents ---

    async def version(self, kind: Kind) -> int:
        return await self._run(lambda: self._current_version(kind))

    async def snapshot(self, kind: Kind, version: int | None) -> Snapshot | None:
        query = f"SELECT {_INFO}, text FROM snapshots WHERE kind = ? AND version <= ? ORDER BY version DESC LIMIT 1"
        if version is not None:
            query = f"SELECT {_INFO}, text FROM snapshots WHERE kind = ? AND version = ?"
        row = await self._run(lambda: self._connection.execute(query, (kind, version or _NO_LIMIT)).fetchone())
        return None if row is None else Snapshot(_info(row[:-1]), row[-1])

    async def history(self, kind: Kind, limit: int, before: int | None) -> tuple[VersionInfo, ...]:
        query = f"SELECT {_INFO} FROM snapshots WHERE kind = ? AND version < ? ORDER BY version DESC LIMIT ?"
        arguments = (kind, _NO_LIMIT if before is None else before, limit)
        rows = await self._run(lambda: self._connection.execute(query, arguments).fetchall())
        return tuple(map(_info, rows))

    async def append(self, snapshot: Snapshot, keep: int) -> None:
        await self._run(lambda: self._append(snapshot, keep))

    def _append(self, snapshot: Snapshot, keep: int) -> None:
        info = snapshot.info
        row = (*_info_row(info), snapshot.text)
        with _transaction(self._connection):
            current = self._current_version(info.kind)
            if current == info.version and self._stored(info.kind) == row:
                return
            if current != info.version - 1:
                raise ConflictError(info.kind, info.version - 1, current)
            self._connection.execute(f"INSERT INTO snapshots ({_INFO}, text) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            oldest = info.version - keep
            self._connection.execute("DELETE FROM snapshots WHERE kind = ? AND version <= ?", (info.kind, oldest))

    def _current_version(self, kind: Kind) -> int:
        row = self._connection.execute("SELECT max(version) FROM snapshots WHERE kind = ?", (kind,)).fetchone()
        return int(row[0] or 0)

    def _stored(self, kind: Kind) -> tuple[object, ...]:
        query = f"SELECT {_INFO}, text FROM snapshots WHERE kind = ? ORDER BY version DESC LIMIT 1"
        return tuple(self._connection.execute(query, (kind,)).fetchone())

    # --- rollouts ---

    async def rollout(self, rollout_id: str) -> RolloutRecord | None:
        query = f"SELECT {_ROLLOUT} FROM rollouts WHERE rollout_id = ?"
        row = await self._run(lambda: self._connection.execute(query, (rollout_id,)).fetchone())
        return None if row is None else _rollout(row)

    async def rollouts(self, limit: int) -> tuple[RolloutRecord, ...]:
        query = f"SELECT {_ROLLOUT} FROM rollouts ORDER BY started DESC LIMIT ?"
        rows = await self._run(lambda: self._connection.execute(query, (limit,)).fetchall())
        return tuple(map(_rollout, rows))

    async def unfinished_rollouts(self) -> tuple[RolloutRecord, ...]:
        query = f"SELECT {_ROLLOUT} FROM rollouts WHERE NOT finished ORDER BY started"
        rows = await self._run(lambda: self._connection.execute(query).fetchall())
        return tuple(map(_rollout, rows))

    async def put_rollout(self, record: RolloutRecord, keep: int) -> None:
        await self._run(lambda: self._put_rollout(record, keep))

    def _put_rollout(self, record: RolloutRecord, keep: int) -> None:
        row = (record.rollout_id, record.revision, record.state, int(record.finished), record.updated_at)
        with _transaction(self._connection):
            query = f"SELECT {_ROLLOUT} FROM rollouts WHERE rollout_id = ?"
            stored = self._connection.execute(query, (record.rollout_id,)).fetchone()
            if stored == row:
                return
            revision = stored[1] if stored else 0
            if revision != record.revision - 1:
                raise ConflictError(f"rollout {record.rollout_id}", record.revision - 1, revision)
            if not stored:
                self._make_room(keep)
            self._connection.execute(
                f"INSERT INTO rollouts ({_ROLLOUT}) VALUES (?, ?, ?, ?, ?) ON CONFLICT (rollout_id) DO UPDATE SET "
                "revision = excluded.revision, state = excluded.state, finished = excluded.finished, "
                "updated_at = excluded.updated_at",
                row,
            )

    def _make_room(self, keep: int) -> None:
        (count,) = self._connection.execute("SELECT count(*) FROM rollouts").fetchone()
        if count < keep:
            return
        oldest = "SELECT started FROM rollouts WHERE finished ORDER BY started LIMIT ?"
        self._connection.execute(f"DELETE FROM rollouts WHERE started IN ({oldest})", (count - keep + 1,))
        (count,) = self._connection.execute("SELECT count(*) FROM rollouts").fetchone()
        if count >= keep:
            raise StoreFullError(f"{count} rollouts are unfinished, and no more are kept")

    # --- audit ---

    async def append_audit(self, entry: AuditEntry, keep: int) -> int:
        return await self._run(lambda: self._append_audit(entry, keep))

    def _append_audit(self, entry: AuditEntry, keep: int) -> int:
        row = (entry.actor, entry.action, entry.target, entry.outcome, entry.at, entry.detail)
        with _transaction(self._connection):
            newest = f"SELECT sequence, {_AUDIT} FROM audit ORDER BY sequence DESC LIMIT 1"
            stored = self._connection.execute(newest).fetchone()
            if stored and stored[1:] == row:
                return int(stored[0])
            cursor = self._connection.execute(f"INSERT INTO audit ({_AUDIT}) VALUES (?, ?, ?, ?, ?, ?)", row)
            sequence = cursor.lastrowid or 0
            self._connection.execute("DELETE FROM audit WHERE sequence <= ?", (sequence - keep,))
        return sequence

    async def audit(self, limit: int, before: int | None) -> tuple[AuditEntry, ...]:
        query = f"SELECT {_AUDIT}, sequence FROM audit WHERE sequence < ? ORDER BY sequence DESC LIMIT ?"
        arguments = (_NO_LIMIT if before is None else before, limit)
        rows = await self._run(lambda: self._connection.execute(query, arguments).fetchall())
        return tuple(AuditEntry(*row) for row in rows)

    # --- inside ---

    async def _run(self, call: Callable[[], T]) -> T:
        """On the store's thread. A caller that goes away does not undo a write that has begun."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, call)
        except sqlite3.Error as error:
            raise UnavailableError(f"SQLite: {error}") from error


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """An immediate one: it holds the write lock from its first read on, so what it read still holds at its end."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # some errors, such as a full disk, have already ended it
            connection.execute("ROLLBACK")
        raise


# --- opening ---------------------------------------------------------------------------------------------------------


def _open(path: Path, busy_timeout_s: float) -> sqlite3.Connection:
    try:
        path.touch(mode=0o600)  # if it is new: access documents are nobody else's business
        connection = sqlite3.connect(path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"cannot open the store {path}: {error}") from error
    try:
        with _transaction(connection):
            _create_or_check(connection, path)
        _use_wal(connection, busy_timeout_s)
        connection.execute("PRAGMA synchronous = FULL")
    except sqlite3.Error as error:
        connection.close()
        raise StoreError(f"cannot use the store {path}: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _use_wal(connection: sqlite3.Connection, busy_timeout_s: float) -> None:
    """SQLite does not wait for other processes when it changes the journal's mode, so we do."""
    give_up_at = time.monotonic() + busy_timeout_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.01)


def _create_or_check(connection: sqlite3.Connection, path: Path) -> None:
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (schema_version,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if num_tables == 0:
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    elif application_id != _APPLICATION_ID:
        raise StoreError(f"{path} is a SQLite file of another application")
    elif schema_version > SCHEMA_VERSION:
        raise StoreError(f"{path} has schema {schema_version}, this version of Paceline reads up to {SCHEMA_VERSION}")


# --- rows ------------------------------------------------------------------------------------------------------------


def _info(row: tuple[Any, ...]) -> VersionInfo:
    return VersionInfo(Kind(row[0]), *row[1:])


def _info_row(info: VersionInfo) -> tuple[str | int | float | None, ...]:
    author, reason = info.author, info.reason
    return (info.kind.value, info.version, info.digest, author, reason, info.written_at, info.diff, info.restores)


def _rollout(row: tuple[Any, ...]) -> RolloutRecord:
    rollout_id, revision, state, finished, updated_at = row
    return RolloutRecord(rollout_id, revision, state, bool(finished), updated_at)
