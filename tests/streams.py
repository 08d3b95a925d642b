"""Replicas without a model, and networks that fail, for tests of the pool streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc.aio

from cluster.messages.answer import FinishReason
from cluster.messages.request import SamplingParams
from cluster.messages.rounds import Abort, Commit, Submit
from cluster.transport.hub import PoolHub
from cluster.transport.protocol import PoolProtocol, StreamSettings
from cluster.transport.server import PoolServer

PATIENCE_S = 10.0  # how long a condition may take before its test fails


def submit(request_id: str, prompt: tuple[int, ...] = (1, 2, 3)) -> Submit:
    return Submit(request_id, prompt, SamplingParams(max_tokens=8, seed=1))


def end_aborted(command: Any) -> list[Any]:
    """What a target engine answers: every aborted request gets its last event."""
    return [Commit(command.request_id, 0, (), finish_reason=FinishReason.CANCELLED)] * isinstance(command, Abort)


class FakeEngine:
    """Records commands, batch by batch, and publishes what `answer` says to each."""

    def __init__(self, hub: PoolHub[Any, Any], answer: Callable[[Any], list[Any]] = end_aborted) -> None:
        self.hub = hub
        self.batches: list[tuple[Any, ...]] = []
        self._answer = answer
        self._arrived = asyncio.Event()
        hub.bind(self)

    @property
    def commands(self) -> list[Any]:
        return [command for batch in self.batches for command in batch]

    def handle(self, commands: Sequence[Any], /) -> None:
        self.batches.append(tuple(commands))
        self._arrived.set()
        self.hub.publish([event for command in commands for event in self._answer(command)])

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for commands until the condition holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._arrived.clear()
                await self._arrived.wait()

    async def until_has(self, *commands: Any) -> None:
        await self.until(lambda: all(command in self.commands for command in commands))


class Sink:
    """Collects the events of some requests."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._arrived = asyncio.Event()

    def __call__(self, event: Any) -> None:
        self.events.append(event)
        self._arrived.set()

    async def until(self, num_events: int) -> list[Any]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.events) < num_events:
                self._arrived.clear()
                await self._arrived.wait()
        return self.events


@asynccontextmanager
async def serving(
    protocol: PoolProtocol[Any, Any],
    answer: Callable[[Any], list[Any]] = end_aborted,
    settings: StreamSettings | None = None,
    port: int = 0,
) -> AsyncIterator[tuple[PoolServer[Any, Any], FakeEngine]]:
    """A pool replica with a fake engine, on a real port."""
    hub: PoolHub[Any, Any] = PoolHub(protocol)
    engine = FakeEngine(hub, answer)
    server = PoolServer(hub, port=port, settings=settings) if settings else PoolServer(hub, port=port)
    await server.start()
    try:
        yield server, engine
    finally:
        await server.stop(grace_s=0)


@asynccontextmanager
async def raw_call(address: str, service: str) -> AsyncIterator[grpc.aio.StreamStreamCall[bytes, bytes]]:
    """A router's call as bare bytes, read and written by the test."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        call = channel.stream_stream(f"/{service}/Connect", None, None)(None)
        yield call
        call.cancel()


@asynccontextmanager
async def raw_replica(service: str, behave: Callable[[Any], Any]) -> AsyncIterator[str]:
    """A replica's end as bare bytes: `behave(context)` is the handler. Yields the address."""

    async def connect(_: object, context: Any) -> None:
        await behave(context)

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handler = grpc.stream_stream_rpc_method_handler(connect)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Connect": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class Network:
    """A TCP proxy in front of a replica: it forwards, goes silent as a dead machine does, or cuts its connections."""

    def __init__(self, address: str) -> None:
        self._host, port = address.split(":")
        self._port = int(port)
        self._silent = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []
        self._relays: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Yields the address under which the replica is reached through this network."""

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._relays.add(asyncio.create_task(self._relay(reader, writer)))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            self.cut()
            await asyncio.gather(*self._relays)

    def go_silent(self) -> None:
        """From now on bytes vanish in both directions, and nobody is told."""
        self._silent.set()

    def cut(self) -> None:
        for writer in self._writers:
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, far_writer]
        await asyncio.gather(self._forward(reader, far_writer), self._forward(far_reader, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if not self._silent.is_set():
                    writer.write(data)
        if not self._silent.is_set():
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
