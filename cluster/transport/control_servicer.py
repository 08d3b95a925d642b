"""The gRPC control service over any backend: checks who calls, and speaks protobuf."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from google.protobuf.message import Message

from cluster.control.finished_request import FinishedRequest
from cluster.control.store import Change, Restore
from cluster.messages.answer import ErrorKind, RequestError
from cluster.transport import control_codec as codec
from cluster.transport import report_codec, rollout_servicer
from cluster.transport.admin_token import AUTHORIZATION, AdminToken
from cluster.transport.control_backend import MAX_RECORDS, ControlBackend, RolloutBackend, RouterDesk
from cluster.transport.feed_codec import record_from_wire
from cluster.transport.generation import internal_errors
from cluster.transport.grpc_errors import Context, call_metadata, ending_calls
from cluster.transport.limits import CodecError
from protos.paceline.v1 import control_pb2 as pb
from protos.paceline.v1 import control_pb2_grpc

logger = logging.getLogger(__name__)

DEFAULT_PAGE = 20
MAX_ROUTER_ID_CHARS = 128

Metadata = Mapping[str, str]
Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply")
Item = TypeVar("Item")


class ControlServicer:
    """Owns the ControlService's methods, free of any server: errors are raised as RequestError.

    `metadata` is the call's, with lower-case names.
    """

    def __init__(self, backend: Callable[[], ControlBackend], token: AdminToken) -> None:
        self._backend = backend
        self._token = token

    async def get_document(self, request: pb.GetDocumentRequest, metadata: Metadata) -> pb.Document:
        self._token.check(metadata.get(AUTHORIZATION))
        version = request.version if request.HasField("version") else None
        return codec.snapshot_to_wire(await self._backend().get(codec.kind_from_wire(request.kind), version))

    async def apply_document(self, request: pb.ApplyDocumentRequest, metadata: Metadata) -> pb.Document:
        self._token.check(metadata.get(AUTHORIZATION))
        change = Change(request.text, request.author, request.reason)
        expected = request.expected_version if request.HasField("expected_version") else None
        snapshot = await self._backend().apply(codec.kind_from_wire(request.kind), change, expected)
        return codec.snapshot_to_wire(snapshot)

    async def roll_back(self, request: pb.RollBackRequest, metadata: Metadata) -> pb.Document:
        self._token.check(metadata.get(AUTHORIZATION))
        kind = codec.kind_from_wire(request.kind)
        restore = Restore(request.version, request.author, request.reason)
        return codec.snapshot_to_wire(await self._backend().roll_back(kind, restore))

    async def switch_speculation(self, request: pb.SwitchSpeculationRequest, metadata: Metadata) -> pb.Document:
        self._token.check(metadata.get(AUTHORIZATION))
        switch = codec.switch_from_wire(request)
        return codec.snapshot_to_wire(await self._backend().switch_speculation(switch, request.author, request.reason))

    async def list_versions(self, request: pb.ListVersionsRequest, metadata: Metadata) -> pb.ListVersionsResponse:
        self._token.check(metadata.get(AUTHORIZATION))
        before = request.before if request.HasField("before") else None
        kind = codec.kind_from_wire(request.kind)
        versions = await self._backend().history(kind, request.limit or DEFAULT_PAGE, before)
        return pb.ListVersionsResponse(versions=map(codec.version_to_wire, versions))

    async def list_audit(self, request: pb.ListAuditRequest, metadata: Metadata) -> pb.ListAuditResponse:
        self._token.check(metadata.get(AUTHORIZATION))
        before = request.before if request.HasField("before") else None
        entries = await self._backend().audit(request.limit or DEFAULT_PAGE, before)
        return pb.ListAuditResponse(entries=map(codec.audit_to_wire, entries))

    async def get_status(self, request: pb.GetStatusRequest, metadata: Metadata) -> pb.GetStatusResponse:
        self._token.check(metadata.get(AUTHORIZATION))
        return codec.status_to_wire(await self._backend().status())

    def rollouts(self, metadata: Metadata) -> RolloutBackend:
        """For whoever has the token."""
        self._token.check(metadata.get(AUTHORIZATION))
        return self._backend().rollouts

    async def start_rollout(self, request: pb.StartRolloutRequest, metadata: Metadata) -> pb.Rollout:
        return await rollout_servicer.start(self.rollouts(metadata), request)

    async def get_rollout(self, request: pb.GetRolloutRequest, metadata: Metadata) -> pb.Rollout:
        return await rollout_servicer.get(self.rollouts(metadata), request)

    async def list_rollouts(self, request: pb.ListRolloutsRequest, metadata: Metadata) -> pb.ListRolloutsResponse:
        return await rollout_servicer.list_all(self.rollouts(metadata), request)

    async def control_rollout(self, request: pb.ControlRolloutRequest, metadata: Metadata) -> pb.Rollout:
        return await rollout_servicer.control(self.rollouts(metadata), request)

    async def get_report(self, request: pb.GetReportRequest, metadata: Metadata) -> pb.GetReportResponse:
        self._token.check(metadata.get(AUTHORIZATION))
        report = await self._backend().report(report_codec.query_from_wire(request))
        return report_codec.report_to_wire(report)

    async def watch(self, request: pb.WatchRequest, metadata: Metadata) -> AsyncGenerator[pb.Document, None]:
        self._token.check(metadata.get(AUTHORIZATION))
        kind = codec.kind_from_wire(request.kind)
        async with aclosing(self._backend().watch(kind, request.after_version)) as snapshots:
            async for snapshot in snapshots:
                yield codec.snapshot_to_wire(snapshot)


class RouterServicer:
    """Owns the control service's end of the routers' streams."""

    def __init__(self, desk: RouterDesk, token: AdminToken) -> None:
        self._desk = desk
        self._token = token

    async def connect(
        self, reports: AsyncIterator[pb.RouterReport], metadata: Metadata
    ) -> AsyncGenerator[pb.ControlUpdate, None]:
        """Documents for one router, while its acknowledgements come in. Ends when the router ends its half."""
        self._token.check_if_set(metadata.get(AUTHORIZATION))
        first = await anext(aiter(reports), None)
        if first is None or not 0 < len(first.router_id) <= MAX_ROUTER_ID_CHARS:
            message = f"router_id: the first report must have one, of 1 to {MAX_ROUTER_ID_CHARS} characters"
            raise RequestError(ErrorKind.INVALID, message, "router_id")
        reader = asyncio.create_task(self._read(first.router_id, reports))
        try:
            async with aclosing(self._desk.documents(first.router_id)) as documents:
                while (snapshot := await _next_while(reader, documents)) is not None:
                    yield pb.ControlUpdate(documents=[codec.snapshot_to_wire(snapshot)])
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, router_id: str, reports: AsyncIterator[pb.RouterReport]) -> None:
        async for report in reports:
            for item in report.acknowledgements:
                self._desk.acknowledge(router_id, codec.acknowledgement_from_wire(item))
            if report.records:
                self._desk.take_records(_readable(router_id, report.records, self._desk.now()))


def _readable(router_id: str, messages: Sequence[pb.FinishedRequest], now: float) -> list[FinishedRequest]:
    """Those of a report's requests that keep the limits."""
    records: list[FinishedRequest] = []
    for message in messages[:MAX_RECORDS]:
        try:
            records.append(record_from_wire(message, now))
        except CodecError as error:
            logger.warning("router %s reported a request that is left out: %s", router_id, error)
    return records


async def _next_while(reader: asyncio.Task[None], items: AsyncIterator[Item]) -> Item | None:
    """The next item; None once the reader has ended. Raises what it raised."""
    step: asyncio.Future[Item | None] = asyncio.ensure_future(_next(items))
    waits: list[asyncio.Future[Any]] = [reader, step]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if reader.done():
            reader.result()
            return None
        return step.result()
    finally:
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)


async def _next(items: AsyncIterator[Item]) -> Item | None:
    return await anext(items, None)


# --- the grpc.aio binding --------------------------------------------------------------------------------------------


class GrpcControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Binds the servicers to a grpc.aio server."""

    def __init__(self, control: ControlServicer, routers: RouterServicer) -> None:
        self._control = control
        self._routers = routers

    async def GetDocument(self, request: pb.GetDocumentRequest, context: Context) -> pb.Document:
        return await _answer(self._control.get_document, request, context)

    async def ApplyDocument(self, request: pb.ApplyDocumentRequest, context: Context) -> pb.Document:
        return await _answer(self._control.apply_document, request, context)

    async def RollBack(self, request: pb.RollBackRequest, context: Context) -> pb.Document:
        return await _answer(self._control.roll_back, request, context)

    async def SwitchSpeculation(self, request: pb.SwitchSpeculationRequest, context: Context) -> pb.Document:
        return await _answer(self._control.switch_speculation, request, context)

    async def ListVersions(self, request: pb.ListVersionsRequest, context: Context) -> pb.ListVersionsResponse:
        return await _answer(self._control.list_versions, request, context)

    async def ListAudit(self, request: pb.ListAuditRequest, context: Context) -> pb.ListAuditResponse:
        return await _answer(self._control.list_audit, request, context)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        return await _answer(self._control.get_status, request, context)

    async def StartRollout(self, request: pb.StartRolloutRequest, context: Context) -> pb.Rollout:
        return await _answer(self._control.start_rollout, request, context)

    async def GetRollout(self, request: pb.GetRolloutRequest, context: Context) -> pb.Rollout:
        return await _answer(self._control.get_rollout, request, context)

    async def ListRollouts(self, request: pb.ListRolloutsRequest, context: Context) -> pb.ListRolloutsResponse:
        return await _answer(self._control.list_rollouts, request, context)

    async def ControlRollout(self, request: pb.ControlRolloutRequest, context: Context) -> pb.Rollout:
        return await _answer(self._control.control_rollout, request, context)

    async def GetReport(self, request: pb.GetReportRequest, context: Context) -> pb.GetReportResponse:
        return await _answer(self._control.get_report, request, context)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.Document]:
        documents = self._control.watch(request, call_metadata(context))
        async with ending_calls(context), aclosing(documents):
            with internal_errors("Watch"):
                async for document in documents:
                    yield document

    async def Connect(
        self, reports: AsyncIterator[pb.RouterReport], context: Context
    ) -> AsyncIterator[pb.ControlUpdate]:
        await context.send_initial_metadata(())  # tells the router that it is connected
        updates = self._routers.connect(reports, call_metadata(context))
        async with ending_calls(context), aclosing(updates):
            with internal_errors("Connect"):
                async for update in updates:
                    yield update


async def _answer(method: Callable[[Request, Metadata], Awaitable[Reply]], request: Request, context: Context) -> Reply:
    """Run one call; an error ends it with its status."""
    async with ending_calls(context):
        with internal_errors(type(request).__name__):
            return await method(request, call_metadata(context))
    raise AssertionError("the call has ended")
