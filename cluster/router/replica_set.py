"""Keeps one stream to every discovered replica of one pool, and picks the replica a request goes to."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic

from cluster.core.routing import Candidate, filter_ready, pick
from cluster.messages.rounds import PoolLoad
from cluster.transport.protocol import CommandT, EventT
from cluster.transport.stream import PoolStream, StreamClosed

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 5.0


class Pool(StrEnum):
    """Which of a model's pools."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """Where a pool replica is, and what it can do. `address` is host:port of its stream server.

    max_model_len: tokens of the longest sequence that a target replica takes. version: of its model.
    """

    replica_id: str
    address: str
    model: str
    pool: Pool
    metrics_address: str | None = None
    max_model_len: int | None = None
    version: str | None = None


Discover = Callable[[], Awaitable[Sequence[ReplicaInfo]]]


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One connected replica, as the router sees it. num_requests are this router's own."""

    replica_id: str
    address: str
    model: str
    pool: Pool
    version: str | None  # of its model
    num_requests: int
    load: PoolLoad | None


class Replica(Generic[CommandT, EventT]):
    """Owns one connection to a pool replica and knows which requests are on it.

    `key` names the connection, not the replica: a replica that comes back after a broken stream is a new one.
    """

    def __init__(self, key: str, info: ReplicaInfo, stream: PoolStream[CommandT, EventT]) -> None:
        self.key = key
        self.info = info
        self.stream = stream
        self.is_retired = False  # no longer discovered: finishes what it has
        self._on_lost: dict[str, Callable[[], None]] = {}
        stream.on_closed(self._lose_all)

    @property
    def num_requests(self) -> int:
        """This router's requests there."""
        return len(self._on_lost)

    @property
    def is_usable(self) -> bool:
        """Whether new requests may go there."""
        return not self.is_retired and self.stream.end is None

    def attach(self, request_id: str, sink: Callable[[EventT], None], on_lost: Callable[[], None]) -> None:
        """Route a request's events to `sink`, and tell it when the stream ends."""
        self.stream.subscribe(request_id, sink)
        self._on_lost[request_id] = on_lost

    def detach(self, request_id: str) -> None:
        """Forget a request. Unknown ids are ignored."""
        self.stream.unsubscribe(request_id)
        self._on_lost.pop(request_id, None)

    def candidate(self) -> Candidate:
        """What routing needs to know."""
        return Candidate(self.key, self.num_requests, self.stream.load)

    def status(self) -> ReplicaStatus:
        """A snapshot."""
        info, load = self.info, self.stream.load
        return ReplicaStatus(
            info.replica_id, info.address, info.model, info.pool, info.version, self.num_requests, load
        )

    def _lose_all(self, reason: StreamClosed) -> None:
        if self._on_lost:
            logger.warning("lost replica %s with %d requests: %s", self.key, self.num_requests, reason)
        for on_lost in list(self._on_lost.values()):
            on_lost()


@dataclass(slots=True)
class _Reconnect:
    """When a lost replica may be tried again."""

    not_before: float = 0.0
    wait_s: float = FIRST_RETRY_S


class ReplicaSet(Generic[CommandT, EventT]):
    """Owns the connections to one pool."""

    def __init__(
        self, connect: Callable[[ReplicaInfo], PoolStream[CommandT, EventT]], clock: Callable[[], float]
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._replicas: dict[str, Replica[CommandT, EventT]] = {}  # by connection key
        self._reconnects: dict[str, _Reconnect] = {}  # by replica_id, of replicas whose stream has ended
        self._num_connections = 0
        self.on_change: Callable[[], None] | None = None  # a replica came or went
        self.max_model_len: int | None = None  # the shortest of the replicas discovered last, while there were any

    @property
    def num_ready(self) -> int:
        """Replicas that take requests."""
        return len(self._ready())

    def has_ready(self, excluded: Collection[str] = ()) -> bool:
        """Whether any replica outside `excluded` (connection keys) takes requests."""
        return bool(filter_ready(self._candidates(), excluded))

    def pick(self, request_id: str, excluded: Collection[str] = ()) -> Replica[CommandT, EventT] | None:
        """The replica for a request; None: no ready one outside `excluded` (connection keys)."""
        key = pick(self._candidates(), request_id, excluded)
        return None if key is None else self._replicas[key]

    def of_versions(self, versions: Collection[str]) -> list[str]:
        """The connection keys of replicas whose model is of one of these versions."""
        return [key for key, replica in self._replicas.items() if replica.info.version in versions]

    def update(self, infos: Iterable[ReplicaInfo]) -> None:
        """Connect to what is new, reconnect what was lost and is still there, retire what is gone."""
        wanted = {info.replica_id: info for info in infos}
        lengths = [info.max_model_len for info in wanted.values() if info.max_model_len is not None]
        self.max_model_len = min(lengths, default=self.max_model_len)
        for replica in self._replicas.values():
            replica.is_retired = replica.info.replica_id not in wanted
        connected = {replica.info.replica_id for replica in self._replicas.values() if replica.is_usable}
        self._reconnects = {key: value for key, value in self._reconnects.items() if key in wanted}
        for replica_id in wanted.keys() - connected:
            if self._clock() >= self._reconnects.get(replica_id, _Reconnect()).not_before:
                self._open(wanted[replica_id])
        self._changed()

    def statuses(self) -> tuple[ReplicaStatus, ...]:
        """Every connected replica."""
        return tuple(replica.status() for replica in self._replicas.values())

    def idle_retired(self) -> list[PoolStream[CommandT, EventT]]:
        """Take out the streams that have no more to do, to be closed."""
        idle = [replica for replica in self._replicas.values() if replica.is_retired and not replica.num_requests]
        return [self._replicas.pop(replica.key).stream for replica in idle]

    async def close(self) -> None:
        """End every stream; the replicas free all that this router had there."""
        for replica in list(self._replicas.values()):
            await replica.stream.close()

    def _open(self, info: ReplicaInfo) -> None:
        self._num_connections += 1
        replica = Replica(f"{info.replica_id}#{self._num_connections}", info, self._connect(info))
        self._replicas[replica.key] = replica
        replica.stream.on_closed(lambda _: self._forget(replica))

    def _forget(self, replica: Replica[CommandT, EventT]) -> None:
        """A stream has ended, and its requests have been told. A stream that came to report load was a good one."""
        self._replicas.pop(replica.key, None)
        was_good = replica.stream.load is not None
        wait_s = FIRST_RETRY_S
        if not was_good and (previous := self._reconnects.get(replica.info.replica_id)) is not None:
            wait_s = min(LAST_RETRY_S, previous.wait_s * 2)
        self._reconnects[replica.info.replica_id] = _Reconnect(self._clock() + wait_s, wait_s)
        self._changed()

    def _ready(self) -> list[Candidate]:
        return filter_ready(self._candidates())

    def _candidates(self) -> Iterable[Candidate]:
        return (replica.candidate() for replica in self._replicas.values() if replica.is_usable)

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()
