"""Connecting, reconnecting and retiring replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from cluster.messages.rounds import PoolLoad
from cluster.router.replica_set import FIRST_RETRY_S, LAST_RETRY_S, Pool, ReplicaInfo, ReplicaSet
from cluster.transport.stream import CloseCause, StreamClosed

pytestmark = pytest.mark.unit

LOAD = PoolLoad(0, 0, 10, 10, 0)


class FakeStream:
    """A stream that ends when told to."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.load: PoolLoad | None = LOAD
        self.end: StreamClosed | None = None
        self.sinks: dict[str, Any] = {}
        self._callbacks: list[Callable[[StreamClosed], None]] = []

    def send(self, command: object) -> None:
        """Nobody listens."""

    def subscribe(self, request_id: str, sink: Any) -> None:
        self.sinks[request_id] = sink

    def unsubscribe(self, request_id: str) -> None:
        self.sinks.pop(request_id, None)

    def on_closed(self, callback: Callable[[StreamClosed], None]) -> None:
        self._callbacks.append(callback)

    async def close(self) -> None:
        self.end = StreamClosed(CloseCause.LOST, "told to")
        for callback in self._callbacks:
            callback(self.end)


class Rig:
    """A set over fake streams, with a clock that stands still."""

    def __init__(self) -> None:
        self.now = 0.0
        self.streams: list[FakeStream] = []
        self.set: ReplicaSet[Any, Any] = ReplicaSet(self._connect, lambda: self.now)

    def _connect(self, info: ReplicaInfo) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def see(self, *names: str) -> None:
        self.set.update(ReplicaInfo(name, f"{name}:1", "m", Pool.TARGET) for name in names)


async def test_every_discovered_replica_gets_one_stream() -> None:
    rig = Rig()
    rig.see("a", "b")
    rig.see("a", "b")
    assert len(rig.streams) == rig.set.num_ready == 2
    assert {status.replica_id for status in rig.set.statuses()} == {"a", "b"}


async def test_a_lost_replica_is_reconnected_after_a_pause_under_another_key() -> None:
    rig = Rig()
    rig.see("a")
    first = rig.set.pick("r")
    await rig.streams[0].close()
    rig.see("a")
    assert rig.set.num_ready == 0
    rig.now += FIRST_RETRY_S
    rig.see("a")
    second = rig.set.pick("r")
    assert first is not None
    assert second is not None
    assert first.key != second.key


async def test_a_replica_that_never_answers_is_tried_less_and_less_often() -> None:
    rig = Rig()
    pauses: list[float] = []
    rig.see("a")
    for _ in range(8):
        rig.streams[-1].load = None
        await rig.streams[-1].close()
        lost_at, count = rig.now, len(rig.streams)
        while len(rig.streams) == count:
            rig.now += 0.01
            rig.see("a")
        pauses.append(rig.now - lost_at)
    assert pauses[0] == pytest.approx(FIRST_RETRY_S, abs=0.02)
    assert pauses[3] == pytest.approx(FIRST_RETRY_S * 8, abs=0.02)
    assert pauses[-1] == pytest.approx(LAST_RETRY_S, abs=0.02)


async def test_a_replica_that_is_no_longer_discovered_finishes_what_it_has() -> None:
    rig = Rig()
    rig.see("a")
    replica = rig.set.pick("r")
    assert replica is not None
    replica.attach("r", lambda event: None, lambda: None)
    rig.see()
    assert rig.set.pick("r2") is None
    assert rig.set.idle_retired() == []
    replica.detach("r")
    assert rig.set.idle_retired() == [rig.streams[0]]
    assert rig.set.statuses() == ()


async def test_a_replica_that_is_discovered_again_takes_requests_again() -> None:
    rig = Rig()
    rig.see("a")
    rig.see()
    rig.see("a")
    assert rig.set.num_ready == 1
    assert len(rig.streams) == 1


async def test_every_request_on_a_lost_replica_is_told_once() -> None:
    rig = Rig()
    rig.see("a")
    replica = rig.set.pick("r")
    assert replica is not None
    lost: list[str] = []
    for name in ("r1", "r2", "r3"):
        replica.attach(name, lambda event: None, lambda name=name: lost.append(name))  # type: ignore[misc]
    replica.detach("r2")
    await rig.streams[0].close()
    assert lost == ["r1", "r3"]


async def test_changes_are_announced() -> None:
    rig = Rig()
    changes: list[int] = []
    rig.set.on_change = lambda: changes.append(rig.set.num_ready)
    rig.see("a")
    await rig.streams[0].close()
    assert changes == [1, 0]


async def test_a_draining_replica_takes_no_requests() -> None:
    rig = Rig()
    rig.see("a")
    rig.streams[0].load = PoolLoad(1, 0, 10, 10, 0, draining=True)
    assert rig.set.num_ready == 0
    assert not rig.set.has_ready()
