"""Where a pool replica's engine meets the connections of its routers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from cluster.messages.rounds import PoolLoad, RefusalReason
from cluster.transport.codec import Fault, Frame
from cluster.transport.protocol import CommandT, Connection, EngineLike, EventT, PoolProtocol

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubCounters:
    """What the hub has dropped since it began."""

    num_connections: int = 0  # open now
    num_unclaimed_events: int = 0  # of requests whose router has gone or ended them
    num_unclaimed_commands: int = 0  # for requests that their connection does not own, or that have ended
    num_malformed_messages: int = 0
    num_unknown_messages: int = 0


class PoolHub(Generic[CommandT, EventT]):
    """Owns the connections of one engine and routes its events to them.

    Commands go straight to the engine, in the event loop's thread. Events come from the engine's thread through
    `publish`, one hand-over per batch, and are routed in the event loop's. A connection that leaves takes all of its
    requests with it.

        hub = PoolHub(TARGET_PROTOCOL)                     # in a coroutine
        engine = Engine(..., on_events=hub.publish)
        hub.bind(engine)
        server = PoolServer(hub)                           # and / or LoopbackStream(hub)
    """

    def __init__(self, protocol: PoolProtocol[CommandT, EventT]) -> None:
        self.protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._engine: EngineLike[CommandT] | None = None
        self._owners = protocol.owners()
        self._connections: dict[Connection[EventT], None] = {}  # an ordered set
        self._load: EventT | None = None
        self._num_unclaimed_events = 0
        self._num_unclaimed_commands = 0
        self._num_malformed = 0
        self._num_unknown = 0

    def bind(self, engine: EngineLike[CommandT]) -> None:
        """Set the engine that commands go to; before the first connection."""
        self._engine = engine

    @property
    def counters(self) -> HubCounters:
        """A snapshot of what was dropped, and of how many connections there are."""
        return HubCounters(
            len(self._connections),
            self._num_unclaimed_events,
            self._num_unclaimed_commands,
            self._num_malformed,
            self._num_unknown,
        )

    # --- from the engine's thread ---

    def publish(self, events: Sequence[EventT]) -> None:
        """Route a batch of events; thread-safe. Events published after the loop has closed have no readers left."""
        if events and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._route, tuple(events))

    def _route(self, events: tuple[EventT, ...]) -> None:
        batches: dict[Connection[EventT], list[EventT]] = {}
        for event in events:
            if isinstance(event, PoolLoad):
                self._load = event
                recipients = tuple(self._connections)
            else:
                recipients = self._recipients(event)
            for connection in recipients:
                batches.setdefault(connection, []).append(event)
        for connection, batch in batches.items():
            connection.deliver(batch)

    def _recipients(self, event: EventT) -> tuple[Connection[EventT], ...]:
        connection = self._owners.recipient(event)
        if connection is None:
            self._num_unclaimed_events += 1
            return ()
        return (connection,)

    # --- from the connections ---

    def attach(self, connection: Connection[EventT]) -> None:
        """A router has connected; it learns the load at once."""
        self._connections[connection] = None
        if self._load is not None:
            connection.deliver([self._load])

    def detach(self, connection: Connection[EventT]) -> None:
        """A router's stream has ended, for whatever reason: end all of its requests. Idempotent."""
        if connection in self._connections:
            del self._connections[connection]
            self._handle(self._owners.leave(connection))

    def receive(self, connection: Connection[EventT], frame: Frame[CommandT]) -> None:
        """Pass a connection's commands to the engine, and answer those that are malformed."""
        if connection not in self._connections:
            return
        self._num_unknown += frame.num_unknown
        self._handle(self._admit(connection, frame.messages))
        for fault in frame.faults:
            self.quarantine(connection, fault, RefusalReason.UNSUPPORTED)

    def quarantine(self, connection: Connection[EventT], fault: Fault, reason: RefusalReason) -> None:
        """One request's message is at fault: end that request at both ends, unless the message was but a hint."""
        self._num_malformed += 1
        logger.warning("malformed message of request %s: %s", fault.request_id, fault.error)
        if not fault.is_hint:
            self._handle(self._owners.admit(connection, self.protocol.cancel(fault.request_id)))
            connection.deliver([self.protocol.refuse(fault, reason)])

    def _admit(self, connection: Connection[EventT], commands: Sequence[CommandT]) -> list[CommandT]:
        admitted: list[CommandT] = []
        for command in commands:
            passed = self._owners.admit(connection, command)
            self._num_unclaimed_commands += not passed
            admitted.extend(passed)
        return admitted

    def _handle(self, commands: Sequence[CommandT]) -> None:
        if commands:
            if self._engine is None:
                raise RuntimeError("a connection sent commands before the hub was bound to an engine")
            self._engine.handle(commands)
