"""A pool replica's gRPC server: one stream per router, all of them into one engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

import grpc
import grpc.aio

from cluster.messages.rounds import PoolLoad, RefusalReason
from cluster.transport.codec import CONNECT, Fault
from cluster.transport.hub import PoolHub
from cluster.transport.limits import MAX_FRAME_BYTES, CodecError
from cluster.transport.outbox import Outbox, OutboxFull
from cluster.transport.protocol import CommandT, EventT, StreamSettings

logger = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[bytes, bytes]

# An event waits here only while its router does not read: a few seconds' worth of the busiest stream.
REPLICA_SETTINGS = StreamSettings(outbox_bytes=8 << 20)


def server_options(settings: StreamSettings) -> list[tuple[str, Any]]:
    """Keepalive in both directions, routers' pings welcome, and size limits."""
    return [
        ("grpc.keepalive_time_ms", int(settings.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(settings.keepalive_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(settings.keepalive_timeout_s * 1000)),  # the one that gRPC acts on
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10),
        ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
        ("grpc.max_send_message_length", MAX_FRAME_BYTES),
        ("grpc.so_reuseport", 0),
    ]


@dataclass(frozen=True, slots=True)
class _StreamEnd:
    """How one call ends, in gRPC's words."""

    code: grpc.StatusCode
    detail: str


class _GrpcConnection(Generic[CommandT, EventT]):
    """Owns one router's call: what waits to be written to it, and whether this end has given it up."""

    def __init__(self, hub: PoolHub[CommandT, EventT], settings: StreamSettings) -> None:
        self._hub = hub
        self._protocol = hub.protocol
        self._outbox = Outbox(settings.outbox_bytes, settings.frame_bytes)
        self._cut: asyncio.Future[_StreamEnd] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()  # set by the server once the hub has let go of it

    def deliver(self, events: Sequence[EventT], /) -> None:
        for event in events:
            if self._cut.done():
                return
            try:
                self._outbox.put(self._protocol.encode_event(event))
            except CodecError as error:
                self._quarantine(event, error)
            except OutboxFull as error:
                self._outbox.clear()
                self.cut(grpc.StatusCode.RESOURCE_EXHAUSTED, f"slow reader: {error}")

    def _quarantine(self, event: EventT, error: CodecError) -> None:
        """The engine made something that the wire cannot carry: its request ends, its neighbours do not."""
        if isinstance(event, PoolLoad):
            logger.error("the engine reported an impossible load: %s", error)
        else:
            self._hub.quarantine(self, Fault(event.request_id, error), RefusalReason.INTERNAL)

    @property
    def waiting_bytes(self) -> int:
        return self._outbox.num_bytes

    def finish(self) -> None:
        """End the call once everything delivered so far is written."""
        self._outbox.finish()

    def cut(self, code: grpc.StatusCode, detail: str) -> None:
        """End the call now, whatever waits to be written."""
        if not self._cut.done():
            self._cut.set_result(_StreamEnd(code, detail))

    async def serve(self, context: _Context) -> _StreamEnd:
        """Read and write until either side ends the call, or this end gives it up."""
        tasks = [asyncio.create_task(self._read(context)), asyncio.create_task(self._write(context))]
        try:
            done, _ = await asyncio.wait([*tasks, self._cut], return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, context: _Context) -> _StreamEnd:
        while isinstance(frame := await context.read(), bytes):  # else EOF
            try:
                self._hub.receive(self, self._protocol.decode_commands(frame))
            except CodecError as error:
                return _StreamEnd(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return _StreamEnd(grpc.StatusCode.OK, "the router ended the stream")

    async def _write(self, context: _Context) -> _StreamEnd:
        while (frame := await self._outbox.take()) is not None:
            await context.write(frame)
        return _StreamEnd(grpc.StatusCode.OK, "the replica stops")


class PoolServer(Generic[CommandT, EventT]):
    """Owns the port on which routers reach one pool replica, and their calls.

    The event loop that starts it serves it. Stopping it ends every stream; the engine outlives it.
    """

    def __init__(
        self,
        hub: PoolHub[CommandT, EventT],
        host: str = "127.0.0.1",
        port: int = 0,
        settings: StreamSettings = REPLICA_SETTINGS,
    ) -> None:
        self._hub = hub
        self._host = host
        self._settings = settings
        self._connections: set[_GrpcConnection[CommandT, EventT]] = set()
        self._stopping = False
        self._server = grpc.aio.server(options=server_options(settings))
        handler = grpc.stream_stream_rpc_method_handler(self._connect)
        service = grpc.method_handlers_generic_handler(hub.protocol.service, {CONNECT: handler})
        self._server.add_generic_rpc_handlers((service,))
        self._port = self._server.add_insecure_port(f"{host}:{port}")

    @property
    def address(self) -> str:
        """host:port, with the port that was bound."""
        return f"{self._host}:{self._port}"

    @property
    def waiting_bytes(self) -> int:
        """What waits for routers to read it, over all streams; at most settings.outbox_bytes for each."""
        return sum(connection.waiting_bytes for connection in self._connections)

    async def start(self) -> None:
        """Accept streams from now on. The hub must be bound to its engine."""
        await self._server.start()

    async def stop(self, grace_s: float = 1.0) -> None:
        """Write what is delivered, end every stream, and give up on those that take longer than `grace_s`.

        When it returns, the engine has been told to end every request.
        """
        self._stopping = True
        for connection in self._connections:
            connection.finish()
        await self._server.stop(grace_s)
        for connection in (remaining := tuple(self._connections)):
            connection.cut(grpc.StatusCode.OK, "the replica has stopped")
        await asyncio.gather(*(connection.gone.wait() for connection in remaining))

    async def _connect(self, _: object, context: _Context) -> None:
        if self._stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the replica stops")
        await context.send_initial_metadata(())  # tells the router that it is connected
        end = await self._serve(context)
        if end.code is not grpc.StatusCode.OK:
            logger.warning("gave up the stream of %s: %s", context.peer(), end.detail)
            await context.abort(end.code, end.detail)

    async def _serve(self, context: _Context) -> _StreamEnd:
        connection = _GrpcConnection(self._hub, self._settings)
        self._connections.add(connection)
        self._hub.attach(connection)
        try:
            return await connection.serve(context)
        finally:
            self._hub.detach(connection)
            self._connections.discard(connection)
            connection.gone.set()
