"""A router's stream to a pool replica over gRPC."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import grpc.aio

from cluster.transport.codec import CONNECT
from cluster.transport.limits import MAX_FRAME_BYTES, CodecError
from cluster.transport.outbox import Outbox, OutboxFull
from cluster.transport.protocol import CommandT, EventT, PoolProtocol, StreamSettings
from cluster.transport.stream import CloseCause, StreamBase, StreamClosed

logger = logging.getLogger(__name__)


def channel_options(settings: StreamSettings) -> list[tuple[str, Any]]:
    """Keepalive and size limits; each stream has a connection of its own, and reconnecting is the caller's business."""
    return [
        ("grpc.keepalive_time_ms", int(settings.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(settings.keepalive_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(settings.keepalive_timeout_s * 1000)),  # the one that gRPC acts on
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
        ("grpc.max_send_message_length", MAX_FRAME_BYTES),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
    ]


class GrpcStream(StreamBase[CommandT, EventT]):
    """Owns one bidirectional call: a task that reads it and calls the sinks, and a task that writes the outbox.

    Connecting begins at construction (in a coroutine); what is sent meanwhile waits in the outbox.
    """

    def __init__(
        self, protocol: PoolProtocol[CommandT, EventT], address: str, settings: StreamSettings | None = None
    ) -> None:
        super().__init__(protocol)
        settings = settings or StreamSettings()
        self.address = address
        self._outbox = Outbox(settings.outbox_bytes, settings.frame_bytes)
        self._channel = grpc.aio.insecure_channel(address, options=channel_options(settings))
        method = f"/{protocol.service}/{CONNECT}"
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] = self._channel.stream_stream(method, None, None)(None)
        self._connected = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"pool-stream-{address}")

    async def connected(self, timeout_s: float) -> None:
        """Wait until the replica has answered. Raises StreamClosed when it does not in time, which ends the stream."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._connected, self.closed)]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if not self._connected.is_set():
            self._break(CloseCause.LOST, f"{self.address} did not answer within {timeout_s} s")
        self._check_open()

    def send(self, command: CommandT, /) -> None:
        self._check_open()
        part = self._protocol.encode_command(command)
        try:
            self._outbox.put(part)
        except OutboxFull as error:
            self._break(CloseCause.OVERFLOW, str(error))
            self._check_open()

    async def close(self) -> None:
        self._break(CloseCause.LOCAL, "closed by this end")
        await asyncio.wait([self._task])

    def _break(self, cause: CloseCause, detail: str) -> None:
        if self._end is None:
            self._finish(cause, detail)
            self._task.cancel()

    def _finish(self, cause: CloseCause, detail: str) -> None:
        super()._finish(cause, detail)
        self._outbox.clear()

    async def _run(self) -> None:
        """Read until the stream is over."""
        writer = asyncio.create_task(self._write())
        try:
            end = await self._read()
            self._finish(end.cause, end.detail)
        finally:
            self._finish(CloseCause.LOST, "the reader was stopped")  # unless it is known why
            writer.cancel()
            await self._channel.close(None)

    async def _read(self) -> StreamClosed:
        try:
            await self._call.initial_metadata()  # the replica sends it at once; none if the call has failed
            if not self._call.done():
                self._connected.set()
            while isinstance(frame := await self._call.read(), bytes):  # else EOF
                self._receive(self._protocol.decode_events(frame))
        except grpc.aio.AioRpcError as error:
            return StreamClosed(_cause(error.code()), f"{self.address}: {error.code().name}: {error.details()}")
        except CodecError as error:
            return StreamClosed(CloseCause.MALFORMED, f"{self.address}: {error}")
        return StreamClosed(CloseCause.PEER, f"{self.address}: the replica ended the stream")

    async def _write(self) -> None:
        try:
            while (frame := await self._outbox.take()) is not None:
                await self._call.write(frame)
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            logger.debug("%s: the call ended during a write; its reader reports why", self.address)


def _cause(code: grpc.StatusCode) -> CloseCause:
    """Codes that a replica sends on purpose, against those that stand for a broken connection."""
    meant = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
    return CloseCause.PEER if code in meant else CloseCause.LOST
