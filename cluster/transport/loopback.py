"""A stream to an engine in the same process, with faults that a network and its ends can inject."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

from cluster.transport.codec import Frame
from cluster.transport.hub import PoolHub
from cluster.transport.protocol import CommandT, EventT
from cluster.transport.stream import CloseCause, StreamBase

MessageT = TypeVar("MessageT")


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong on a loopback stream: a function of the seed and of the order of messages in each direction.

    Probabilities are per message. Times are in turns: of the event loop when turn_s is 0, else of turn_s seconds.
    A dropped Submit or Commit cannot be made up for without a resume, so `only` limits faults to kinds of messages.
    """

    seed: int = 0
    drop: float = 0.0
    duplicate: float = 0.0  # the copy follows within max_turns
    reorder: float = 0.0  # later messages may overtake this one, by up to max_turns
    delay: float = 0.0  # this message and all after it are late, by up to max_turns
    max_turns: int = 8
    turn_s: float = 0.0
    close_after: int | None = None  # break the stream after this many messages, both directions counted
    only: tuple[type, ...] | None = None  # None: every message is eligible


NO_FAULTS = Faults()


class FaultSchedule:
    """Owns one direction's random draws: what happens to each message, in order."""

    def __init__(self, faults: Faults, direction: str) -> None:
        self._faults = faults
        self._random = Random(f"{faults.seed}:{direction}")
        self._earliest = 0

    def due(self, message: object, now: int) -> list[int]:
        """The turns in which copies of this message arrive: none when it is dropped. `now`: the turn it was sent in."""
        faults = self._faults
        self._earliest = max(self._earliest, now + 1)
        if faults.only is not None and not isinstance(message, faults.only):
            return [self._earliest]
        drop, duplicate, reorder, delay = (self._random.random() for _ in range(4))
        late, copy_late = (self._random.randint(1, faults.max_turns) for _ in range(2))
        if drop < faults.drop:
            return []
        if delay < faults.delay:
            self._earliest += late
        first = self._earliest + (late if reorder < faults.reorder else 0)
        return [first, first + copy_late] if duplicate < faults.duplicate else [first]


class FaultyLink(Generic[MessageT]):
    """Owns what is under way in one direction. Messages due in one turn arrive together, in the order of sending."""

    def __init__(self, faults: Faults, direction: str, arrive: Callable[[list[MessageT]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._schedule = FaultSchedule(faults, direction)
        self._turn_s = faults.turn_s
        self._arrive = arrive
        self._turn = 0
        self._num_sent = 0
        self._under_way: list[tuple[int, int, MessageT]] = []  # a heap of (due turn, order, message)
        self._tick_handle: asyncio.Handle | None = None

    def put(self, message: MessageT) -> None:
        for due in self._schedule.due(message, self._turn):
            self._num_sent += 1
            heapq.heappush(self._under_way, (due, self._num_sent, message))
        self._tick_later()

    def clear(self) -> None:
        """Lose what is under way."""
        self._under_way.clear()

    def _tick_later(self) -> None:
        if self._under_way and self._tick_handle is None:
            later = self._loop.call_later
            self._tick_handle = later(self._turn_s, self._tick) if self._turn_s else self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._tick_handle = None
        self._turn += 1
        arrived: list[MessageT] = []
        while self._under_way and self._under_way[0][0] <= self._turn:
            arrived.append(heapq.heappop(self._under_way)[2])
        self._tick_later()
        if arrived:
            self._arrive(arrived)


class LoopbackStream(StreamBase[CommandT, EventT]):
    """Owns a router's stream to a hub in the same process: no bytes, the same promises as over gRPC, and faults."""

    def __init__(self, hub: PoolHub[CommandT, EventT], faults: Faults = NO_FAULTS) -> None:
        super().__init__(hub.protocol)
        self._hub = hub
        self._close_after = faults.close_after
        self._up: FaultyLink[CommandT] = FaultyLink(faults, "up", self._arrive_up)
        self._down: FaultyLink[EventT] = FaultyLink(faults, "down", self._dispatch)
        hub.attach(self)

    def send(self, command: CommandT, /) -> None:
        self._check_open()
        if self._count_down():
            self._up.put(command)
        else:
            self._check_open()

    def deliver(self, events: Sequence[EventT], /) -> None:
        """The hub's side: events on their way to the router."""
        for event in events:
            if self.end is None and self._count_down():
                self._down.put(event)

    async def close(self) -> None:
        self._finish(CloseCause.LOCAL, "closed by this end")

    def _finish(self, cause: CloseCause, detail: str) -> None:
        super()._finish(cause, detail)
        self._up.clear()
        self._down.clear()
        self._hub.detach(self)

    def _arrive_up(self, commands: list[CommandT]) -> None:
        self._hub.receive(self, Frame(tuple(commands)))

    def _count_down(self) -> bool:
        """Whether one more message passes before the stream breaks; breaks it when none does."""
        if self._close_after is None:
            return True
        if self._close_after == 0:
            self._finish(CloseCause.LOST, "broken by an injected fault")
            return False
        self._close_after -= 1
        return True
