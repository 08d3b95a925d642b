"""The ingress: HTTP and gRPC clients come in here, rounds go out to the pools."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, aclosing
from dataclasses import asdict

import ray
from fastapi import FastAPI
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry, generate_latest
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from cluster.config import ClusterConfig
from cluster.control.store import Kind, Snapshot
from cluster.metrics.feed import FeedMetrics
from cluster.metrics.router import RouterMetrics
from cluster.metrics.serving import serve_metrics
from cluster.router.control_link import ControlLink
from cluster.router.request_feed import RequestFeed
from cluster.router.request_log import REQUEST_LOGGER
from cluster.router.router import GRPC_CONNECTORS, Router
from cluster.runtime.model_store import resolve_model
from cluster.tokenizer import Tokenizer
from cluster.tracing.marks import Place, trace_file
from cluster.tracing.taps import trace_connectors
from cluster.transport.admin_api import PREFIX, create_admin_app
from cluster.transport.admin_token import AdminToken, configured_token
from cluster.transport.control_servicer import ControlServicer
from cluster.transport.inference_servicer import InferenceServicer, policy_metadata
from cluster.transport.openai_api import ApiOptions, create_app
from cluster.transport.readiness import PROBE_TENANT
from deployments.discovery import control_address_from, discover_from
from deployments.live_config import LiveConfig, with_live_part
from deployments.metrics_port import metrics_port
from deployments.priority import yield_to_pools
from deployments.serve_grpc import answer, call_metadata, ending_calls
from protos.paceline.v1 import control_pb2 as control_pb
from protos.paceline.v1 import inference_pb2 as pb


@serve.ingress()
class RouterReplica:
    """One ingress replica: the router, and the two public APIs in front of it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits constructors
        self, config: ClusterConfig, pools: Mapping[str, DeploymentHandle], control: DeploymentHandle
    ) -> None:
        _log_requests()
        yield_to_pools()
        self._config = config
        self._registry = CollectorRegistry()
        tokenizers = {model.name: Tokenizer.load(resolve_model(model.target.path)) for model in config.models}
        self._trace = trace_file("router")
        self._router = Router(
            config,
            tokenizers,
            discover=discover_from(list(pools.values())),
            observer=RouterMetrics(self._registry),
            connectors=GRPC_CONNECTORS if self._trace is None else trace_connectors(self._trace.log),
        )
        self._servicer = InferenceServicer(lambda: self._router)
        self._control = ControlServicer(lambda: self._link.backend(), self._admin_token())
        await self._router.start()
        feed = RequestFeed(time.monotonic)
        self._router.on_finished = lambda event: None if event.labels.tenant == PROBE_TENANT else feed.put(event)
        FeedMetrics(self._registry, lambda: feed.totals)
        self._link = ControlLink(
            ray.get_runtime_context().get_actor_id(),
            control_address_from(control),
            {Kind.POLICY: self._apply_policy, Kind.ACCESS: self._router.access.apply},
            configured_token(os.environ),
            feed,
        )
        self._link.start()
        self._metrics = ExitStack()
        if port := metrics_port():  # else only at /metrics, where one of the router's replicas answers
            self._metrics.enter_context(serve_metrics(self._registry, ray.util.get_node_ip_address(), port))

    def __serve_build_asgi_app__(self) -> FastAPI:
        options = ApiOptions(metrics=lambda: generate_latest(self._registry), service_discovery=self._metrics_targets)
        app = create_app(lambda: self._router, options)
        app.add_api_route("/status", lambda: asdict(self._router.status()), methods=["GET"])
        app.mount(PREFIX, create_admin_app(lambda: self._link.backend(), self._admin_token()))
        return app

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        with ending_calls(grpc_context):
            async with aclosing(self._servicer.generate(request, call_metadata(grpc_context))) as responses:
                async for response in responses:
                    if metadata := policy_metadata(response):
                        grpc_context.set_trailing_metadata(list(metadata))
                    if self._trace is not None:
                        num_tokens = len(response.token_ids)
                        self._trace.log.mark(Place.ROUTER_ANSWERED, response.request_id, 0, num_tokens)
                    yield response

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: RayServegRPCContext) -> pb.TokenizeResponse:
        with ending_calls(grpc_context):
            return await self._servicer.tokenize(request, call_metadata(grpc_context))

    async def Check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        ready = self._router.ready()
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status)

    # --- ControlService, passed on to the control deployment ---

    async def GetDocument(self, request: control_pb.GetDocumentRequest, grpc_context: RayServegRPCContext) -> Message:
        return await answer(self._control.get_document, request, grpc_context)

    async def ApplyDocument(
        self, request: control_pb.ApplyDocumentRequest, grpc_context: RayServegRPCContext
    ) -> Message:
        return await answer(self._control.apply_document, request, grpc_context)

    async def RollBack(self, request: control_pb.RollBackRequest, grpc_context: RayServegRPCContext) -> Message:
        return await answer(self._control.roll_back, request, grpc_context)

    async def SwitchSpeculation(
        self, request: control_pb.SwitchSpeculationRequest, grpc_context: RayServegRPCContext
    ) -> Message:
        return await answer(self._control.switch_speculation, request, grpc_context)

    async def ListVersions(self, request: control_pb.ListVersionsRequest, grpc_context: RayServegRPCContext) -> Message:
        return await answer(self._control.list_versions, request, grpc_context)

    async def ListAudit(self, request: control_pb.ListAuditRequest, grpc_context: RayServegRPCContext) -> Message:
        return await answer(self._control.list_audit, request, grpc_context)

    async def GetStatus(self, request: control_pb.GetStatusRequest, grpc_context: RayServegRPCContext) -> Message:
        return await answer(self._control.get_status, request, grpc_context)

    async def StartRollout(self, request: control_pb.StartRolloutRequest, grpc_context: RayServegRPCContext) -> Message:
        return await answer(self._control.start_rollout, request, grpc_context)

    async def GetRollout(self, request: control_pb.GetRolloutRequest, grpc_context: RayServegRPCContext) -> Message:
        return await answer(self._control.get_rollout, request, grpc_context)

    async def ListRollouts(self, request: control_pb.ListRolloutsRequest, grpc_context: RayServegRPCContext) -> Message:
        return await answer(self._control.list_rollouts, request, grpc_context)

    async def ControlRollout(
        self, request: control_pb.ControlRolloutRequest, grpc_context: RayServegRPCContext
    ) -> Message:
        return await answer(self._control.control_rollout, request, grpc_context)

    async def GetReport(self, request: control_pb.GetReportRequest, grpc_context: RayServegRPCContext) -> Message:
        return await answer(self._control.get_report, request, grpc_context)

    async def Watch(
        self, request: control_pb.WatchRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[control_pb.Document]:
        with ending_calls(grpc_context):
            async with aclosing(self._control.watch(request, call_metadata(grpc_context))) as documents:
                async for document in documents:
                    yield document

    # --- life ---

    async def reconfigure(self, user_config: LiveConfig) -> None:
        """Called by Serve with the live part of the configuration, first of all after the constructor.

        A coroutine, since Serve runs plain functions in a thread, and a router belongs to its event loop.
        """
        self._router.reconfigure(with_live_part(self._config, user_config))

    async def __del__(self) -> None:
        await self._link.stop()
        await self._router.stop()
        await asyncio.to_thread(self._metrics.close)
        if self._trace is not None:
            await asyncio.to_thread(self._trace.write)

    def _apply_policy(self, snapshot: Snapshot) -> None:
        self._router.apply_policy(snapshot.text, snapshot.version)

    def _admin_token(self) -> AdminToken:
        return AdminToken(configured_token(os.environ))

    def _metrics_targets(self) -> list[dict[str, object]]:
        """Prometheus HTTP service discovery: every pool replica's metrics address; series name model and pool."""
        return [
            {"targets": [info.metrics_address], "labels": {"replica": info.replica_id}}
            for info in self._router.replicas()
        ]


def _log_requests() -> None:
    """Each request's line goes to this process's stderr, which Ray keeps."""
    logger = logging.getLogger(REQUEST_LOGGER)
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler())
    logger.propagate = False
