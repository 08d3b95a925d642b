"""The draft pool's streams: DraftCommand to the replica, DraftEvent back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.messages.rounds import Close, DraftBlock, DraftCommand, DraftEvent, Open, PoolLoad
from cluster.transport import codec
from cluster.transport.grpc_stream import GrpcStream
from cluster.transport.protocol import Connection, PoolProtocol, StreamSettings, refuse

_Connection = Connection[DraftEvent]


@dataclass(frozen=True, slots=True)
class _Session:
    connection: _Connection
    epoch: int


class DraftOwners:
    """Owns which connection opened each draft session, from its Open to its Close or refusal.

    Epochs tell the sessions of one request apart: a newer Open takes over, whoever sends it; any other is stale.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}

    def admit(self, connection: _Connection, command: DraftCommand, /) -> Sequence[DraftCommand]:
        session = self._sessions.get(command.request_id)
        if isinstance(command, Open):
            if session is not None and command.epoch <= session.epoch:
                return ()
            self._sessions[command.request_id] = _Session(connection, command.epoch)
            return (command,)
        if session is None or session.connection is not connection:
            return ()
        if isinstance(command, Close):
            del self._sessions[command.request_id]
        return (command,)

    def recipient(self, event: DraftEvent, /) -> _Connection | None:
        if isinstance(event, PoolLoad) or (session := self._sessions.get(event.request_id)) is None:
            return None
        if event.epoch != session.epoch:
            return None
        if not isinstance(event, DraftBlock):
            del self._sessions[event.request_id]
        return session.connection

    def leave(self, connection: _Connection, /) -> Sequence[DraftCommand]:
        ended = [name for name, session in self._sessions.items() if session.connection is connection]
        for request_id in ended:
            del self._sessions[request_id]
        return [Close(request_id) for request_id in ended]


DRAFT_PROTOCOL: PoolProtocol[DraftCommand, DraftEvent] = PoolProtocol(
    service=codec.DRAFT_SERVICE,
    encode_command=codec.encode_draft_command,
    decode_commands=codec.decode_draft_commands,
    encode_event=codec.encode_draft_event,
    decode_events=codec.decode_draft_events,
    cancel=Close,
    refuse=refuse,
    owners=DraftOwners,
)


class GrpcDraftStream(GrpcStream[DraftCommand, DraftEvent]):
    """Owns a router's stream to one draft replica."""

    def __init__(self, address: str, settings: StreamSettings | None = None) -> None:
        super().__init__(DRAFT_PROTOCOL, address, settings)
