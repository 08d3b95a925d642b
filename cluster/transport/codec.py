"""The pool protocols' bytes: messages ↔ protobuf frames. Nothing else in the pool transport sees generated code.

A frame is a serialized `TargetCommands`, `TargetEvents`, `DraftCommands` or `DraftEvents`. Protobuf merges repeated
fields of concatenated messages, so a frame of many messages is the concatenation of frames of one: senders encode each
message when it is handed over (a message that the wire cannot carry fails there, at its sender), and join bytes later.

What a malformed frame costs:

    bytes that do not parse, or a message that names no usable request   CodecError: the whole stream is at fault
    a message that names its request but breaks a limit                  a Fault: only that request is
    a kind of message this version does not know                         skipped and counted
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError

from cluster.messages.rounds import (
    Abort,
    Close,
    Commit,
    Committed,
    DraftBlock,
    DraftCommand,
    DraftEvent,
    Open,
    PoolLoad,
    Refusal,
    SetDraftLimit,
    Submit,
    TargetCommand,
    TargetEvent,
)
from cluster.transport import codec_messages as pairs
from cluster.transport.limits import MAX_COUNT, MAX_FRAME_BYTES, CodecError, check_request_id
from protos.paceline.v1 import draft_pb2, target_pb2

TARGET_SERVICE: str = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
DRAFT_SERVICE: str = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
CONNECT = "Connect"

MessageT = TypeVar("MessageT")
ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class Fault:
    """One message that breaks a limit, and the request it belongs to. `is_hint`: the request can do without it."""

    request_id: str
    error: CodecError
    epoch: int = 0
    is_hint: bool = False


@dataclass(frozen=True, slots=True)
class Frame(Generic[MessageT]):
    """A decoded frame: its sound messages in order, the faulty ones, and how many were of an unknown kind."""

    messages: tuple[MessageT, ...]
    faults: tuple[Fault, ...] = ()
    num_unknown: int = 0


# --- frames ----------------------------------------------------------------------------------------------------------


def encode_target_command(command: TargetCommand) -> bytes:
    """A frame of one command. Raises CodecError naming the field that the wire cannot carry."""
    return _encode(lambda: target_pb2.TargetCommands(commands=[_target_command(command)]).SerializeToString())


def encode_target_event(event: TargetEvent) -> bytes:
    """A frame of one event. Raises CodecError naming the field that the wire cannot carry."""
    return _encode(lambda: target_pb2.TargetEvents(events=[_target_event(event)]).SerializeToString())


def encode_draft_command(command: DraftCommand) -> bytes:
    """A frame of one command. Raises CodecError naming the field that the wire cannot carry."""
    return _encode(lambda: draft_pb2.DraftCommands(commands=[_draft_command(command)]).SerializeToString())


def encode_draft_event(event: DraftEvent) -> bytes:
    """A frame of one event. Raises CodecError naming the field that the wire cannot carry."""
    return _encode(lambda: draft_pb2.DraftEvents(events=[_draft_event(event)]).SerializeToString())


def decode_target_commands(frame: bytes) -> Frame[TargetCommand]:
    """Raises CodecError when the whole frame is at fault."""
    parsed = _parse(target_pb2.TargetCommands.FromString, frame)
    return _decode(((item.WhichOneof("command"), item) for item in parsed.commands), _TARGET_COMMANDS)


def decode_target_events(frame: bytes) -> Frame[TargetEvent]:
    """Raises CodecError when the whole frame is at fault."""
    parsed = _parse(target_pb2.TargetEvents.FromString, frame)
    return _decode(((item.WhichOneof("event"), item) for item in parsed.events), _TARGET_EVENTS)


def decode_draft_commands(frame: bytes) -> Frame[DraftCommand]:
    """Raises CodecError when the whole frame is at fault."""
    parsed = _parse(draft_pb2.DraftCommands.FromString, frame)
    return _decode(((item.WhichOneof("command"), item) for item in parsed.commands), _DRAFT_COMMANDS)


def decode_draft_events(frame: bytes) -> Frame[DraftEvent]:
    """Raises CodecError when the whole frame is at fault."""
    parsed = _parse(draft_pb2.DraftEvents.FromString, frame)
    return _decode(((item.WhichOneof("event"), item) for item in parsed.events), _DRAFT_EVENTS)


def _encode(serialize: Callable[[], bytes]) -> bytes:
    try:
        frame = serialize()
    except CodecError:
        raise
    except (ValueError, TypeError) as error:  # what protobuf raises for a value that its field cannot hold
        raise CodecError(f"the wire cannot carry this message: {error}") from error
    if len(frame) > MAX_FRAME_BYTES:
        raise CodecError(f"message: must have at most {MAX_FRAME_BYTES} bytes, got {len(frame)}")
    return frame


def _parse(parser: Callable[[bytes], ItemT], frame: bytes) -> ItemT:
    if len(frame) > MAX_FRAME_BYTES:
        raise CodecError(f"frame: must have at most {MAX_FRAME_BYTES} bytes, got {len(frame)}")
    try:
        return parser(frame)
    except DecodeError as error:
        raise CodecError(f"frame: does not parse: {error}") from error


def _decode(
    items: Iterable[tuple[str | None, ItemT]], readers: Mapping[str, Callable[[ItemT], MessageT | Fault]]
) -> Frame[MessageT]:
    messages: list[MessageT] = []
    faults: list[Fault] = []
    num_unknown = 0
    for kind, item in items:
        if kind is None:
            num_unknown += 1
            continue
        message = readers[kind](item)
        if isinstance(message, Fault):
            faults.append(message)
        else:
            messages.append(message)
    return Frame(tuple(messages), tuple(faults), num_unknown)


# --- one item of a frame ---------------------------------------------------------------------------------------------


def _target_command(command: TargetCommand) -> target_pb2.TargetCommand:
    match command:
        case Submit():
            return target_pb2.TargetCommand(submit=pairs.put_submit(command))
        case DraftBlock():
            return target_pb2.TargetCommand(propose=pairs.put_draft_block(command))
        case SetDraftLimit():
            return target_pb2.TargetCommand(set_draft_limit=pairs.put_draft_limit(command))
        case Abort():
            return target_pb2.TargetCommand(abort=pairs.put_abort(command))


def _target_event(event: TargetEvent) -> target_pb2.TargetEvent:
    match event:
        case Commit():
            return target_pb2.TargetEvent(commit=pairs.put_commit(event))
        case Refusal():
            return target_pb2.TargetEvent(refusal=pairs.put_refusal(event))
        case PoolLoad():
            return target_pb2.TargetEvent(load=pairs.put_load(event))


def _draft_command(command: DraftCommand) -> draft_pb2.DraftCommand:
    match command:
        case Open():
            return draft_pb2.DraftCommand(open=pairs.put_open(command))
        case Committed():
            return draft_pb2.DraftCommand(committed=pairs.put_committed(command))
        case Close():
            return draft_pb2.DraftCommand(close=pairs.put_close(command))


def _draft_event(event: DraftEvent) -> draft_pb2.DraftEvent:
    match event:
        case DraftBlock():
            return draft_pb2.DraftEvent(block=pairs.put_draft_block(event))
        case Refusal():
            return draft_pb2.DraftEvent(refusal=pairs.put_refusal(event))
        case PoolLoad():
            return draft_pb2.DraftEvent(load=pairs.put_load(event))


def _read(request_id: str, read: Callable[[], MessageT], epoch: int = 0, is_hint: bool = False) -> MessageT | Fault:
    """The message, or the fault of the request it names. Raises CodecError when it names none."""
    try:
        return read()
    except CodecError as error:
        check_request_id(request_id)
        return Fault(request_id, error, epoch if epoch <= MAX_COUNT else 0, is_hint)


def _read_submit(item: target_pb2.TargetCommand) -> Submit | Fault:
    return _read(item.submit.request_id, lambda: pairs.get_submit(item.submit))


def _read_propose(item: target_pb2.TargetCommand) -> DraftBlock | Fault:
    return _read(item.propose.request_id, lambda: pairs.get_draft_block(item.propose), is_hint=True)


def _read_draft_limit(item: target_pb2.TargetCommand) -> SetDraftLimit | Fault:
    body = item.set_draft_limit
    return _read(body.request_id, lambda: pairs.get_draft_limit(body), is_hint=True)


def _read_commit(item: target_pb2.TargetEvent) -> Commit | Fault:
    return _read(item.commit.request_id, lambda: pairs.get_commit(item.commit))


def _read_refusal(item: target_pb2.TargetEvent | draft_pb2.DraftEvent) -> Refusal | Fault:
    return _read(item.refusal.request_id, lambda: pairs.get_refusal(item.refusal), item.refusal.epoch)


def _read_open(item: draft_pb2.DraftCommand) -> Open | Fault:
    return _read(item.open.request_id, lambda: pairs.get_open(item.open), item.open.epoch)


def _read_committed(item: draft_pb2.DraftCommand) -> Committed | Fault:
    return _read(item.committed.request_id, lambda: pairs.get_committed(item.committed), item.committed.epoch)


def _read_block(item: draft_pb2.DraftEvent) -> DraftBlock | Fault:
    return _read(item.block.request_id, lambda: pairs.get_draft_block(item.block), item.block.epoch)


_TARGET_COMMANDS: Mapping[str, Callable[[target_pb2.TargetCommand], TargetCommand | Fault]] = {
    "submit": _read_submit,
    "propose": _read_propose,
    "set_draft_limit": _read_draft_limit,
    "abort": lambda item: pairs.get_abort(item.abort),
}
_TARGET_EVENTS: Mapping[str, Callable[[target_pb2.TargetEvent], TargetEvent | Fault]] = {
    "commit": _read_commit,
    "refusal": _read_refusal,
    "load": lambda item: pairs.get_load(item.load),
}
_DRAFT_COMMANDS: Mapping[str, Callable[[draft_pb2.DraftCommand], DraftCommand | Fault]] = {
    "open": _read_open,
    "committed": _read_committed,
    "close": lambda item: pairs.get_close(item.close),
}
_DRAFT_EVENTS: Mapping[str, Callable[[draft_pb2.DraftEvent], DraftEvent | Fault]] = {
    "block": _read_block,
    "refusal": _read_refusal,
    "load": lambda item: pairs.get_load(item.load),
}
