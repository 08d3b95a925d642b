"""What tells the two pool protocols apart: their bytes, and which events end a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from cluster.messages.rounds import DraftCommand, DraftEvent, Refusal, RefusalReason, TargetCommand, TargetEvent
from cluster.transport.codec import Fault, Frame

CommandT = TypeVar("CommandT", bound=TargetCommand | DraftCommand)
EventT = TypeVar("EventT", bound=TargetEvent | DraftEvent)
CommandT_contra = TypeVar("CommandT_contra", bound=TargetCommand | DraftCommand, contravariant=True)
EventT_co = TypeVar("EventT_co", bound=TargetEvent | DraftEvent, covariant=True)
EventT_contra = TypeVar("EventT_contra", bound=TargetEvent | DraftEvent, contravariant=True)


class EngineLike(Protocol[CommandT_contra]):
    """What a pool replica runs. `handle` is thread-safe, never blocks and never raises for one request's sake.

    Every Submit that it is given is answered by exactly one last event: a Commit with a finish_reason, or a Refusal.
    """

    def handle(self, commands: Sequence[CommandT_contra], /) -> None: ...


class Connection(Protocol[EventT_contra]):
    """One router's end of a stream, as the replica sees it."""

    def deliver(self, events: Sequence[EventT_contra], /) -> None:
        """Send these to the router, in order; never blocks and never raises."""
        ...


class Owners(Protocol[CommandT, EventT]):
    """Which connection each request belongs to. Pure; the hub asks it about everything that passes."""

    def admit(self, connection: Connection[EventT], command: CommandT, /) -> Sequence[CommandT]:
        """What to pass to the engine for this command: nothing when it does not concern the connection's requests."""
        ...

    def recipient(self, event: EventT, /) -> Connection[EventT] | None:
        """Who gets an event of a request. None: nobody any more."""
        ...

    def leave(self, connection: Connection[EventT], /) -> Sequence[CommandT]:
        """Forget a connection: the commands that end all of its requests."""
        ...


@dataclass(frozen=True, slots=True)
class PoolProtocol(Generic[CommandT, EventT]):
    """One pool service, as functions.

    `cancel` makes the command that ends a request, `refuse` the event that tells its router that it has ended.
    """

    service: str
    encode_command: Callable[[CommandT], bytes]
    decode_commands: Callable[[bytes], Frame[CommandT]]
    encode_event: Callable[[EventT], bytes]
    decode_events: Callable[[bytes], Frame[EventT]]
    cancel: Callable[[str], CommandT]
    refuse: Callable[[Fault, RefusalReason], EventT]
    owners: Callable[[], Owners[CommandT, EventT]]


def refuse(fault: Fault, reason: RefusalReason) -> Refusal:
    """What the router of a request hears when one of its messages is at fault."""
    return Refusal(fault.request_id, reason, f"malformed message: {fault.error}", fault.epoch)


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Bounds of one end of a stream. A dead peer is noticed within keepalive_s + keepalive_timeout_s."""

    outbox_bytes: int = 32 << 20  # what may wait for the peer to read before the stream is cut
    frame_bytes: int = 256 << 10  # messages are joined up to this; a larger one travels alone
    keepalive_s: float = 2.0
    keepalive_timeout_s: float = 3.0
