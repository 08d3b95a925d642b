"""A router's end of a stream to one pool replica, whatever carries it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol

from cluster.messages.rounds import PoolLoad, RefusalReason
from cluster.transport.codec import Fault, Frame
from cluster.transport.protocol import CommandT, CommandT_contra, EventT, EventT_co, PoolProtocol

logger = logging.getLogger(__name__)


class CloseCause(StrEnum):
    """Why a stream ended."""

    LOCAL = "local"  # close() was called
    PEER = "peer"  # the replica ended it: it stops, or it cut a slow reader
    LOST = "lost"  # no connection, or it broke
    OVERFLOW = "overflow"  # the replica does not read what it is sent
    MALFORMED = "malformed"  # the replica sent bytes that are not a frame


class StreamClosed(Exception):
    """The stream is over: nothing more will be sent or received on it."""

    def __init__(self, cause: CloseCause, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail


@dataclass(frozen=True, slots=True)
class StreamCounters:
    """What one end of a stream has dropped since it began."""

    num_unclaimed_events: int = 0  # for requests that nobody subscribes to any more
    num_malformed_messages: int = 0
    num_unknown_messages: int = 0
    num_failed_sinks: int = 0


class PoolStream(Protocol[CommandT_contra, EventT_co]):
    """What a router holds for each pool replica. All of it belongs to one event loop."""

    closed: asyncio.Event

    @property
    def load(self) -> PoolLoad | None:
        """The replica's occupancy as last reported."""
        ...

    @property
    def end(self) -> StreamClosed | None:
        """Why the stream is over; None while it is not."""
        ...

    def send(self, command: CommandT_contra, /) -> None:
        """Hand over a command; never blocks. What is sent in one turn of the loop travels as one frame.

        Raises StreamClosed when the stream is over, or when this command overfills it, which ends it; CodecError when
        the wire cannot carry the command.
        """
        ...

    def subscribe(self, request_id: str, sink: Callable[[EventT_co], None]) -> None:
        """Call `sink` with each event of the request, in the receive loop: it must be quick and must not raise.

        A sink that raises loses its subscription, and its request is cancelled at the replica. Malformed events reach
        it as a Refusal(INTERNAL). It is not called when the stream ends: see on_closed.
        """
        ...

    def unsubscribe(self, request_id: str) -> None:
        """Drop later events of the request. Unknown ids are ignored."""
        ...

    def on_closed(self, callback: Callable[[StreamClosed], None]) -> None:
        """Call back once, from the event loop, when the stream is over; soon if it already is."""
        ...

    async def close(self) -> None:
        """End the stream: the replica forgets all its requests. Idempotent."""
        ...


class StreamBase(Generic[CommandT, EventT]):
    """Owns a stream's subscriptions, last load and end; how commands travel is left to what derives from it."""

    def __init__(self, protocol: PoolProtocol[CommandT, EventT]) -> None:
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._sinks: dict[str, Callable[[EventT], None]] = {}
        self._callbacks: list[Callable[[StreamClosed], None]] = []
        self._load: PoolLoad | None = None
        self._end: StreamClosed | None = None
        self._num_unclaimed = 0
        self._num_malformed = 0
        self._num_unknown = 0
        self._num_failed_sinks = 0
        self.closed = asyncio.Event()

    @property
    def load(self) -> PoolLoad | None:
        return self._load

    @property
    def end(self) -> StreamClosed | None:
        return self._end

    @property
    def counters(self) -> StreamCounters:
        """A snapshot of what was dropped."""
        return StreamCounters(self._num_unclaimed, self._num_malformed, self._num_unknown, self._num_failed_sinks)

    def subscribe(self, request_id: str, sink: Callable[[EventT], None]) -> None:
        self._sinks[request_id] = sink

    def unsubscribe(self, request_id: str) -> None:
        self._sinks.pop(request_id, None)

    def on_closed(self, callback: Callable[[StreamClosed], None]) -> None:
        if self._end is None:
            self._callbacks.append(callback)
        else:
            self._loop.call_soon(callback, self._end)

    def send(self, command: CommandT, /) -> None:
        raise NotImplementedError

    def _check_open(self) -> None:
        if self._end is not None:
            raise StreamClosed(self._end.cause, self._end.detail)

    def _finish(self, cause: CloseCause, detail: str) -> None:
        """Mark the stream as over. Each callback runs on its own, so that one's failure is not the others'."""
        if self._end is not None:
            return
        self._end = StreamClosed(cause, detail)
        self.closed.set()
        self._sinks.clear()
        for callback in self._callbacks:
            self._loop.call_soon(callback, self._end)
        self._callbacks.clear()

    def _receive(self, frame: Frame[EventT]) -> None:
        self._num_unknown += frame.num_unknown
        self._dispatch(frame.messages)
        for fault in frame.faults:
            self._quarantine(fault)

    def _dispatch(self, events: Sequence[EventT]) -> None:
        for event in events:
            if isinstance(event, PoolLoad):
                self._load = event
            elif (sink := self._sinks.get(event.request_id)) is not None:
                self._hand_over(event.request_id, sink, event)
            else:
                self._num_unclaimed += 1

    def _hand_over(self, request_id: str, sink: Callable[[EventT], None], event: EventT) -> None:
        try:
            sink(event)
        except Exception:
            logger.exception("the sink of request %s failed; the request is cancelled", request_id)
            self._num_failed_sinks += 1
            self._drop(request_id)

    def _quarantine(self, fault: Fault) -> None:
        """The replica garbled a request's event: end that request here and there, and nothing else."""
        self._num_malformed += 1
        logger.warning("malformed event of request %s: %s", fault.request_id, fault.error)
        refusal = self._protocol.refuse(fault, RefusalReason.INTERNAL)
        if (sink := self._sinks.get(fault.request_id)) is not None:
            self._hand_over(fault.request_id, sink, refusal)
        self._drop(fault.request_id)

    def _drop(self, request_id: str) -> None:
        self.unsubscribe(request_id)
        with suppress(StreamClosed):  # then the replica has ended the request already
            self.send(self._protocol.cancel(request_id))
