"""The control deployment: one replica that keeps what operators put in force, and tells every router."""

from __future__ import annotations

import os
import time
from pathlib import Path

import grpc.aio
import ray

from cluster.config import ClusterConfig
from cluster.control.open_store import open_store
from cluster.controller.service import ControlService
from cluster.router.policy_source import default_document
from cluster.transport.admin_token import AdminToken, configured_token
from cluster.transport.control_servicer import ControlServicer, GrpcControlServicer, RouterServicer
from cluster.transport.protocol import StreamSettings
from cluster.transport.server import server_options
from deployments.live_config import LiveConfig, with_live_part
from deployments.priority import yield_to_pools
from protos.paceline.v1 import control_pb2_grpc

STOP_GRACE_S = 1.0
SQLITE = "sqlite://"
STORE_VARIABLE = "PACELINE_STORE_URL"  # goes before the configuration, so that a password need not be written there


class ControlReplica:
    """Owns the control service and the port on which routers reach it."""

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]  # Serve awaits constructors
        yield_to_pools()
        self._config = config
        store = await open_store(_store_url(config.control.store))
        self._service = ControlService(store, default_document(config), time.time)
        await self._service.start()
        token = AdminToken(configured_token(os.environ))
        servicer = GrpcControlServicer(
            ControlServicer(lambda: self._service, token), RouterServicer(self._service, token)
        )
        self._server = grpc.aio.server(options=server_options(StreamSettings()))
        control_pb2_grpc.add_ControlServiceServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        host = ray.util.get_node_ip_address()
        self._address = f"{host}:{self._server.add_insecure_port(f'{host}:0')}"
        await self._server.start()

    async def reconfigure(self, user_config: LiveConfig) -> None:
        """Called by Serve with the live part of the configuration; a coroutine, as in the router."""
        self._service.set_default_policy(default_document(with_live_part(self._config, user_config)))

    def record_replica_metadata(self) -> dict[str, object]:
        return {"address": self._address}

    async def __del__(self) -> None:
        await self._server.stop(STOP_GRACE_S)
        await self._service.stop()


def _store_url(configured: str) -> str:
    """The store's URL; a SQLite file's folder is made, and ~ is the user's home there."""
    url = os.environ.get(STORE_VARIABLE) or configured
    if not url.startswith(SQLITE):
        return url
    path = Path(url.removeprefix(SQLITE).replace("/~/", "~/", 1)).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    return f"{SQLITE}{path}"
