"""A client of the control service: the same interface that the service itself has, and a router's stream to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio

from cluster.control.finished_request import FinishedRequest
from cluster.control.report import Report
from cluster.control.report_query import ReportQuery
from cluster.control.store import AuditEntry, Change, Kind, Restore, Snapshot, VersionInfo
from cluster.control.switch import SpeculationSwitch
from cluster.transport import control_codec as codec
from cluster.transport import report_codec
from cluster.transport.admin_token import AUTHORIZATION
from cluster.transport.control_backend import Acknowledgement, ControlStatus
from cluster.transport.feed_codec import records_to_wire
from cluster.transport.grpc_errors import request_error
from cluster.transport.grpc_stream import channel_options
from cluster.transport.protocol import StreamSettings
from cluster.transport.rollout_client import RolloutClient
from protos.paceline.v1 import control_pb2 as pb
from protos.paceline.v1 import control_pb2_grpc

CALL_TIMEOUT_S = 10.0

Request = TypeVar("Request")
Reply = TypeVar("Reply")

Answer = Callable[[Snapshot], Acknowledgement]


@dataclass(frozen=True, slots=True)
class RouterEnd:
    """What a router does on its stream to the control service.

    answer: puts a document in force, or says why not. next_batch: waits for finished requests to report, whose
    finished_at is on `clock`; None: it reports none.
    """

    router_id: str
    answer: Answer
    on_connected: Callable[[], None]
    next_batch: Callable[[], Awaitable[Sequence[FinishedRequest]]] | None = None
    clock: Callable[[], float] = time.monotonic


class ControlClient:
    """Owns a channel to one control service. A ControlBackend; every failed call raises RequestError."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=channel_options(StreamSettings()))
        self._stub = control_pb2_grpc.ControlServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = () if token is None else ((AUTHORIZATION, f"Bearer {token}"),)
        self.rollouts = RolloutClient(self._stub, self._call)

    async def close(self) -> None:
        await self._channel.close(None)

    async def get(self, kind: Kind, version: int | None = None) -> Snapshot:
        request = pb.GetDocumentRequest(kind=codec.kind_to_wire(kind), version=version)
        return codec.snapshot_from_wire(await self._call(self._stub.GetDocument, request))

    async def apply(self, kind: Kind, change: Change, expected_version: int | None = None) -> Snapshot:
        request = pb.ApplyDocumentRequest(
            kind=codec.kind_to_wire(kind),
            text=change.text,
            author=change.author,
            reason=change.reason,
            expected_version=expected_version,
        )
        return codec.snapshot_from_wire(await self._call(self._stub.ApplyDocument, request))

    async def roll_back(self, kind: Kind, restore: Restore) -> Snapshot:
        request = pb.RollBackRequest(
            kind=codec.kind_to_wire(kind), version=restore.version, author=restore.author, reason=restore.reason
        )
        return codec.snapshot_from_wire(await self._call(self._stub.RollBack, request))

    async def switch_speculation(self, switch: SpeculationSwitch, author: str, reason: str) -> Snapshot:
        request = codec.switch_to_wire(switch, author, reason)
        return codec.snapshot_from_wire(await self._call(self._stub.SwitchSpeculation, request))

    async def history(self, kind: Kind, limit: int, before: int | None = None) -> tuple[VersionInfo, ...]:
        request = pb.ListVersionsRequest(kind=codec.kind_to_wire(kind), limit=limit, before=before)
        response = await self._call(self._stub.ListVersions, request)
        return tuple(map(codec.version_from_wire, response.versions))

    async def audit(self, limit: int, before: int | None = None) -> tuple[AuditEntry, ...]:
        response = await self._call(self._stub.ListAudit, pb.ListAuditRequest(limit=limit, before=before))
        return tuple(map(codec.audit_from_wire, response.entries))

    async def status(self) -> ControlStatus:
        return codec.status_from_wire(await self._call(self._stub.GetStatus, pb.GetStatusRequest()))

    async def report(self, query: ReportQuery) -> Report:
        return report_codec.report_from_wire(await self._call(self._stub.GetReport, report_codec.query_to_wire(query)))

    async def watch(self, kind: Kind, after_version: int = 0) -> AsyncGenerator[Snapshot, None]:
        request = pb.WatchRequest(kind=codec.kind_to_wire(kind), after_version=after_version)
        call = self._stub.Watch(request, metadata=self._metadata)
        try:
            async for document in call:
                yield codec.snapshot_from_wire(document)
        except grpc.aio.AioRpcError as error:
            raise request_error(error) from error
        finally:
            call.cancel()

    async def follow(self, router: RouterEnd) -> None:
        """A router's stream: answer each document and report finished requests, until the stream ends.

        Raises RequestError when it breaks; returns when the service ends it.
        """
        reports: asyncio.Queue[pb.RouterReport] = asyncio.Queue()
        reports.put_nowait(pb.RouterReport(router_id=router.router_id))
        call = self._stub.Connect(_drain(reports), metadata=self._metadata)
        feed = asyncio.create_task(_feed(router, reports))
        try:
            await call.initial_metadata()
            if not call.done():
                router.on_connected()
            async for update in call:
                snapshots = map(codec.snapshot_from_wire, update.documents)
                answers = [codec.acknowledgement_to_wire(router.answer(snapshot)) for snapshot in snapshots]
                reports.put_nowait(pb.RouterReport(acknowledgements=answers))
        except grpc.aio.AioRpcError as error:
            raise request_error(error) from error
        finally:
            call.cancel()
            feed.cancel()
            await asyncio.gather(feed, return_exceptions=True)

    async def _call(self, method: Callable[..., Awaitable[Reply]], request: Request) -> Reply:
        try:
            return await method(request, metadata=self._metadata, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise request_error(error) from error


async def _drain(reports: asyncio.Queue[pb.RouterReport]) -> AsyncIterator[pb.RouterReport]:
    while True:
        yield await reports.get()
        reports.task_done()  # the stream has taken it


async def _feed(router: RouterEnd, reports: asyncio.Queue[pb.RouterReport]) -> None:
    """Report finished requests, one batch at a time: what the stream has not taken stays with the router."""
    while router.next_batch is not None:
        await reports.join()
        batch = await router.next_batch()
        reports.put_nowait(pb.RouterReport(records=records_to_wire(batch, router.clock())))
