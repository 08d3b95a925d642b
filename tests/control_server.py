"""The control service on a real port of this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from cluster.control.document import parse_document
from cluster.control.open_store import open_store
from cluster.control.store import Kind, Snapshot
from cluster.controller.service import ControlService
from cluster.router.control_link import ControlLink
from cluster.transport.admin_token import AdminToken
from cluster.transport.control_servicer import ControlServicer, GrpcControlServicer, RouterServicer
from cluster.transport.protocol import StreamSettings
from cluster.transport.server import server_options
from protos.paceline.v1 import control_pb2_grpc

TOKEN = "the-admin-token"
ACCESS_TEXT = "schema: paceline.access/v1\n"
DEFAULT_POLICY = parse_document({"schema": "paceline.policy/v1"})


@dataclass(frozen=True, slots=True)
class ControlServer:
    """A service, and where it is."""

    service: ControlService
    address: str


@asynccontextmanager
async def control_server(where: Path | str, token: str | None = TOKEN) -> AsyncIterator[ControlServer]:
    """A control service over the store at a URL, or in a SQLite file, inside the block."""
    store = await open_store(where if isinstance(where, str) else f"sqlite://{where}")
    service = ControlService(store, DEFAULT_POLICY, lambda: 1_000.0)
    await service.start()
    server = grpc.aio.server(options=server_options(StreamSettings()))
    admin = AdminToken(token)
    servicer = GrpcControlServicer(ControlServicer(lambda: service, admin), RouterServicer(service, admin))
    control_pb2_grpc.add_ControlServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield ControlServer(service, f"127.0.0.1:{port}")
    finally:
        await server.stop(None)
        await service.stop()


def policy(salt: str) -> str:
    return f"schema: paceline.policy/v1\nsalt: {salt}\n"


class Follower:
    """A router as far as documents go: what it has put in force, and a way to wait for the next."""

    def __init__(self, server: ControlServer | None = None) -> None:
        self.address = None if server is None else server.address
        self.texts: list[str] = []
        self._arrived = asyncio.Event()
        self.link = ControlLink("router-1", self._discover, dict.fromkeys(Kind, self._apply), TOKEN)

    async def _discover(self) -> str | None:
        return self.address

    def _apply(self, snapshot: Snapshot) -> None:
        if "unknown" in snapshot.text:
            raise ValueError("schema: newer than this router")
        self.texts.append(snapshot.text)
        self._arrived.set()

    async def arrives(self, salt: str) -> None:
        text = policy(salt) if salt else ACCESS_TEXT
        async with asyncio.timeout(30):
            while text not in self.texts:
                self._arrived.clear()
                await self._arrived.wait()
