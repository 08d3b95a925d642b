"""The control service on a real port of this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from cluster.control.control_store import ControlStore
from cluster.control.document import parse_document
from cluster.control.sqlite_store import SQLiteBackend
from cluster.controller.service import ControlService
from cluster.transport.admin_token import AdminToken
from cluster.transport.control_servicer import ControlServicer, GrpcControlServicer, RouterServicer
from protos.paceline.v1 import control_pb2_grpc

TOKEN = "the-admin-token"
DEFAULT_POLICY = parse_document({"schema": "paceline.policy/v1"})


@dataclass(frozen=True, slots=True)
class ControlServer:
    """A service, and where it is."""

    service: ControlService
    address: str


@asynccontextmanager
async def control_server(path: Path, token: str | None = TOKEN) -> AsyncIterator[ControlServer]:
    """A control service over the SQLite file at `path`, inside the block."""
    service = ControlService(ControlStore(await SQLiteBackend.open(path)), DEFAULT_POLICY, lambda: 1_000.0)
    await service.start()
    server = grpc.aio.server()
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
