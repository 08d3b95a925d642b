"""The store for clusters: a Redis (or Valkey) server that every process of the control service reaches.

Each write is one Lua script, so it is atomic. All keys share one hash tag. A server with `appendonly yes` has a write
in its log before it answers: killing and restarting it loses nothing; a power failure loses what `appendfsync` allows.

| key | type | holds |
| --- | --- | --- |
| version:<kind> | string | the current version |
| text:<kind>, info:<kind> | hash | version → text; version → the rest, as JSON |
| rollout | hash | rollout id → record, as JSON |
| rollout:revision | hash | rollout id → revision |
| rollout:started | string | rollouts started so far |
| rollout:unfinished, rollout:finished | sorted set | rollout id, by start |
| audit:sequence | string | entries written so far |
| audit | stream | <sequence>-0 → entry, as JSON |
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any, Self
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

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

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
TIMEOUT_S = 2.0  # to connect, and for an answer
_RETRIES = 3
_BACKOFF = ExponentialBackoff(cap=0.5, base=0.05)  # seconds between tries: a call fails within about 10 s in all

# A script that finds its very write in place answers as if it had made it: its first answer was lost.
_CLAIM = """
local current = tonumber(redis.call('GET', KEYS[1]) or ARGV[1])
if current <= tonumber(ARGV[1]) then redis.call('SET', KEYS[1], ARGV[1]) end
return current
"""
_APPEND = """
local version, info, text, keep = tonumber(ARGV[1]), ARGV[2], ARGV[3], tonumber(ARGV[4])
local current = tonumber(redis.call('GET', KEYS[1]) or '0')
if current == version and redis.call('HGET', KEYS[2], version) == info and redis.call('HGET', KEYS[3], version) == text
then return {'done', version} end
if current ~= version - 1 then return {'conflict', current} end
redis.call('SET', KEYS[1], version)
redis.call('HSET', KEYS[2], version, info)
redis.call('HSET', KEYS[3], version, text)
local oldest = version - keep
while oldest > 0 and redis.call('HDEL', KEYS[2], oldest) == 1 do
    redis.call('HDEL', KEYS[3], oldest)
    oldest = oldest - 1
end
return {'done', version}
"""
_PUT_ROLLOUT = """
local id, revision, record, finished, keep = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4] == '1', tonumber(ARGV[5])
local records, revisions, started, unfinished, done = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
if redis.call('HGET', records, id) == record then return {'done', revision} end
local current = tonumber(redis.call('HGET', revisions, id) or '0')
if current ~= revision - 1 then return {'conflict', current} end
local score = redis.call('ZSCORE', unfinished, id) or redis.call('ZSCORE', done, id)
if not score then
    local num_unfinished = redis.call('ZCARD', unfinished)
    if num_unfinished >= keep then return {'full', num_unfinished} end
    while num_unfinished + redis.call('ZCARD', done) >= keep do
        local oldest = redis.call('ZPOPMIN', done)[1]
        redis.call('HDEL', records, oldest)
        redis.call('HDEL', revisions, oldest)
    end
    score = redis.call('INCR', started)
end
redis.call('ZREM', finished and unfinished or done, id)
redis.call('ZADD', finished and done or unfinished, score, id)
redis.call('HSET', records, id, record)
redis.call('HSET', revisions, id, revision)
return {'done', revision}
"""
_APPEND_AUDIT = """
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if newest and newest[2][2] == ARGV[1] then return tonumber(redis.call('GET', KEYS[1])) end
local sequence = redis.call('INCR', KEYS[1])
redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[2], sequence .. '-0', 'entry', ARGV[1])
return sequence
"""


class RedisBackend:
    """Owns the connections to one server, and the keys of one namespace there."""

    def __init__(self, client: Redis, server: str, namespace: str) -> None:
        self._client = client
        self._server = server  # for messages: never the URL, which may hold a password
        self._namespace = namespace
        self._is_claimed = False
        self._append_script = client.register_script(_APPEND)
        self._put_rollout_script = client.register_script(_PUT_ROLLOUT)
        self._append_audit_script = client.register_script(_APPEND_AUDIT)

    @classmethod
    async def open(cls, url: str, namespace: str = "paceline", timeout_s: float = TIMEOUT_S) -> Self:
        """Connect to redis://, rediss:// (TLS) or unix://, with user and password (ACL) and database number in the URL.

        A server that does not answer yet is asked again with each call. Raises StoreError for a URL that is none, and
        UnavailableError for a server that refuses us or has a namespace of a newer Paceline.
        """
        server = _server_of(url)
        try:
            client = Redis.from_url(
                url, decode_responses=True, retry=Retry(_BACKOFF, _RETRIES),
                socket_timeout=timeout_s, socket_connect_timeout=timeout_s,
            )  # fmt: skip
        except ValueError:
            raise StoreError(f"the store's URL for {server} has an option that is not understood") from None
        backend = cls(client, server, namespace)
        try:
            await backend.version(Kind.POLICY)
        except BaseException as error:
            if not _may_pass(error):
                await client.aclose()
                raise
            logger.warning("the control store does not answer yet: %s", error)
        return backend

    async def close(self) -> None:
        await self._client.aclose()

    # --- documents ---

    async def version(self, kind: Kind) -> int:
        async with self._asking():
            return int(await self._client.get(self._key(f"version:{kind}")) or 0)

    async def snapshot(self, kind: Kind, version: int | None) -> Snapshot | None:
        if version is None:
            return await self._current(kind)
        async with self._asking(), self._client.pipeline() as pipeline:
            pipeline.hget(self._key(f"info:{kind}"), str(version))
            pipeline.hget(self._key(f"text:{kind}"), str(version))
            info, text = await pipeline.execute()
        return None if info is None else Snapshot(_info(info), text)

    async def history(self, kind: Kind, limit: int, before: int | None) -> tuple[VersionInfo, ...]:
        current = await self.version(kind)
        newest = current if before is None else min(current, before - 1)
        versions = [str(version) for version in range(newest, max(newest - limit, 0), -1)]
        if not versions:
            return ()
        async with self._asking():
            infos: list[Any] = await self._client.hmget(self._key(f"info:{kind}"), versions)
        return tuple(_info(info) for info in infos if info is not None)

    async def append(self, snapshot: Snapshot, keep: int) -> None:
        info = snapshot.info
        keys = [self._key(f"{name}:{info.kind}") for name in ("version", "info", "text")]
        async with self._asking():
            answer = await self._append_script(keys, [info.version, _json(info), snapshot.text, keep])
        _settle(answer, info.kind, info.version)

    # --- rollouts ---

    async def rollout(self, rollout_id: str) -> RolloutRecord | None:
        async with self._asking():
            record: Any = await self._client.hget(self._key("rollout"), rollout_id)
        return None if record is None else _rollout(record)

    async def rollouts(self, limit: int) -> tuple[RolloutRecord, ...]:
        async with self._asking(), self._client.pipeline() as pipeline:
            for name in ("rollout:unfinished", "rollout:finished"):
                pipeline.zrevrange(self._key(name), 0, limit - 1, withscores=True)
            unfinished, finished = await pipeline.execute()
        newest = sorted([*unfinished, *finished], key=lambda started: -started[1])[:limit]
        return await self._records([rollout_id for rollout_id, _ in newest])

    async def unfinished_rollouts(self) -> tuple[RolloutRecord, ...]:
        async with self._asking():
            rollout_ids: Any = await self._client.zrange(self._key("rollout:unfinished"), 0, -1)
        return await self._records(rollout_ids)

    async def put_rollout(self, record: RolloutRecord, keep: int) -> None:
        names = ("rollout", "rollout:revision", "rollout:started", "rollout:unfinished", "rollout:finished")
        arguments: list[str | int] = [record.rollout_id, record.revision, _json(record), int(record.finished), keep]
        async with self._asking():
            answer = await self._put_rollout_script([self._key(name) for name in names], arguments)
        _settle(answer, f"rollout {record.rollout_id}", record.revision)

    # --- audit ---

    async def append_audit(self, entry: AuditEntry, keep: int) -> int:
        keys = [self._key("audit:sequence"), self._key("audit")]
        async with self._asking():
            return int(await self._append_audit_script(keys, [_json(replace(entry, sequence=0)), keep]))

    async def audit(self, limit: int, before: int | None) -> tuple[AuditEntry, ...]:
        newest = "+" if before is None else f"({before}-0"
        async with self._asking():
            entries: Any = await self._client.xrevrange(self._key("audit"), newest, "-", limit)
        return tuple(_audit_entry(entry_id, fields) for entry_id, fields in entries)

    # --- inside ---

    async def _claim(self) -> None:
        """Note our schema in the namespace, unless a newer one is there."""
        schema = int(await self._client.eval(_CLAIM, 1, self._key("schema"), str(SCHEMA_VERSION)))
        if schema > SCHEMA_VERSION:
            found = f"{self._namespace} on {self._server} has schema {schema}"
            raise UnavailableError(f"{found}, this version of Paceline reads up to {SCHEMA_VERSION}")
        self._is_claimed = True

    async def _current(self, kind: Kind) -> Snapshot | None:
        """Read again if versions were written, and this one forgotten, between two questions."""
        while True:
            version = await self.version(kind)
            snapshot = await self.snapshot(kind, version) if version else None
            if snapshot is not None or version == 0:
                return snapshot

    async def _records(self, rollout_ids: list[str]) -> tuple[RolloutRecord, ...]:
        if not rollout_ids:
            return ()
        async with self._asking():
            records: list[Any] = await self._client.hmget(self._key("rollout"), rollout_ids)
        return tuple(_rollout(record) for record in records if record is not None)

    def _key(self, name: str) -> str:
        return f"{{{self._namespace}}}:{name}"

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        try:
            if not self._is_claimed:
                await self._claim()
            yield
        except RedisError as error:
            raise UnavailableError(f"Redis at {self._server}: {error}") from error


def _may_pass(error: BaseException) -> bool:
    """Whether a server that could not be used may be of use later, asked in the same way."""
    causes = list(_causes(error))
    is_refused = any(isinstance(cause, AuthenticationError) for cause in causes)
    return not is_refused and any(isinstance(cause, (RedisConnectionError, RedisTimeoutError)) for cause in causes)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The client says why a connection failed in the cause of a ConnectionError."""
    cause = error.__cause__
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _server_of(url: str) -> str:
    """Where a URL leads, without user and password. Raises StoreError for a URL that does not say."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 6379
    except ValueError:
        parts, host, port = urlsplit(""), None, 0
    if parts.scheme == "unix" and parts.path:
        return parts.path
    if parts.scheme in ("redis", "rediss") and host:
        return f"{host}:{port}"
    # Neither the URL nor the parser's complaint is repeated: a password that is not escaped may be anywhere in them.
    raise StoreError(
        "the store's URL must be sqlite:///, redis://, rediss:// or unix://, with special characters escaped"
    )


def _settle(answer: list[Any], what: str, number: int) -> None:
    """Raise what a script answered, unless it wrote `number`."""
    outcome, found = answer
    if outcome == "conflict":
        raise ConflictError(what, number - 1, int(found))
    if outcome == "full":
        raise StoreFullError(f"{found} rollouts are unfinished, and no more are kept")


# --- JSON ------------------------------------------------------------------------------------------------------------


def _json(record: VersionInfo | RolloutRecord | AuditEntry) -> str:
    return json.dumps(asdict(record), separators=(",", ":"))


def _info(text: str) -> VersionInfo:
    fields = json.loads(text)
    return VersionInfo(**{**fields, "kind": Kind(fields["kind"])})


def _rollout(text: str) -> RolloutRecord:
    return RolloutRecord(**json.loads(text))


def _audit_entry(entry_id: str, fields: dict[str, str]) -> AuditEntry:
    return replace(AuditEntry(**json.loads(fields["entry"])), sequence=int(entry_id.partition("-")[0]))
