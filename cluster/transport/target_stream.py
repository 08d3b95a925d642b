"""The target pool's streams: TargetCommand to the replica, TargetEvent back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.messages.rounds import Abort, Commit, PoolLoad, Submit, TargetCommand, TargetEvent
from cluster.transport import codec
from cluster.transport.grpc_stream import GrpcStream
from cluster.transport.protocol import Connection, PoolProtocol, StreamSettings, refuse

_Connection = Connection[TargetEvent]


@dataclass(slots=True)
class _Run:
    """One submission of a request id. `is_live`: neither its router nor a lost connection has ended it."""

    connection: _Connection | None
    is_live: bool = True


class TargetOwners:
    """Owns which connection submitted each request, from its Submit to its last event.

    The engine answers every Submit with exactly one last event, so the runs of one id form a queue: events belong to
    the oldest. A router that comes back under the same id is thus never taken for finished by the end of the run that
    its lost connection left behind.
    """

    def __init__(self) -> None:
        self._runs: dict[str, list[_Run]] = {}

    def admit(self, connection: _Connection, command: TargetCommand, /) -> Sequence[TargetCommand]:
        if isinstance(command, Submit):
            return self._submit(connection, command)
        run = self._live_run(command.request_id)
        if run is None or run.connection is not connection:
            return ()
        if isinstance(command, Abort):
            run.is_live = False
        return (command,)

    def _submit(self, connection: _Connection, command: Submit) -> Sequence[TargetCommand]:
        """A repeated Submit is dropped; one from another connection takes the request over."""
        runs = self._runs.setdefault(command.request_id, [])
        run = self._live_run(command.request_id)
        runs_before: tuple[TargetCommand, ...] = ()
        if run is not None:
            if run.connection is connection:
                return ()
            run.is_live = False
            runs_before = (Abort(command.request_id),)
        runs.append(_Run(connection))
        return (*runs_before, command)

    def _live_run(self, request_id: str) -> _Run | None:
        runs = self._runs.get(request_id)
        return runs[-1] if runs and runs[-1].is_live else None

    def recipient(self, event: TargetEvent, /) -> _Connection | None:
        if isinstance(event, PoolLoad) or (runs := self._runs.get(event.request_id)) is None:
            return None
        connection = runs[0].connection if len(runs) == 1 else None  # a superseded run has no reader
        if not isinstance(event, Commit) or event.finish_reason is not None:
            self._end_oldest(event.request_id, runs)
        return connection

    def _end_oldest(self, request_id: str, runs: list[_Run]) -> None:
        del runs[0]
        if not runs:
            del self._runs[request_id]

    def leave(self, connection: _Connection, /) -> Sequence[TargetCommand]:
        aborts: list[TargetCommand] = []
        for request_id, runs in self._runs.items():
            for run in runs:
                if run.connection is connection:
                    run.connection = None
                    if run.is_live:
                        run.is_live = False
                        aborts.append(Abort(request_id))
        return aborts


TARGET_PROTOCOL: PoolProtocol[TargetCommand, TargetEvent] = PoolProtocol(
    service=codec.TARGET_SERVICE,
    encode_command=codec.encode_target_command,
    decode_commands=codec.decode_target_commands,
    encode_event=codec.encode_target_event,
    decode_events=codec.decode_target_events,
    cancel=Abort,
    refuse=refuse,
    owners=TargetOwners,
)


class GrpcTargetStream(GrpcStream[TargetCommand, TargetEvent]):
    """Owns a router's stream to one target replica."""

    def __init__(self, address: str, settings: StreamSettings | None = None) -> None:
        super().__init__(TARGET_PROTOCOL, address, settings)
