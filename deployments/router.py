"""The ingress: HTTP and gRPC clients come in here, rounds go out to the pools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry, generate_latest
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from cluster.config import ClusterConfig
from cluster.messages import RequestError
from cluster.metrics import RouterMetrics
from cluster.router.router import Router
from cluster.runtime.model_store import resolve_model
from cluster.tokenizer import Tokenizer
from cluster.transport.inference_servicer import InferenceServicer, grpc_status
from cluster.transport.openai_api import create_app
from deployments.discovery import discover_from
from protos.paceline.v1 import inference_pb2 as pb


@serve.deployment(name="router", max_ongoing_requests=10_000, health_check_period_s=2, health_check_timeout_s=30)
@serve.ingress()
class RouterReplica:
    """One ingress replica: the router, and the two public APIs in front of it."""

    async def __init__(self, config: ClusterConfig, pools: Mapping[str, DeploymentHandle]) -> None:
        self._registry = CollectorRegistry()
        tokenizers = {model.name: Tokenizer.load(resolve_model(model.target.path)) for model in config.models}
        self._router = Router(
            config, tokenizers, discover=discover_from(list(pools.values())), observer=RouterMetrics(self._registry)
        )
        self._servicer = InferenceServicer(self._router)
        await self._router.start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(
            lambda: self._router,
            metrics=lambda: generate_latest(self._registry).decode(),
            service_discovery=self._metrics_targets,
            status=lambda: asdict(self._router.status()),
        )

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        try:
            async for response in self._servicer.generate(request, _metadata(grpc_context)):
                yield response
        except RequestError as error:
            _fail(grpc_context, error)
            raise

    async def Tokenize(
        self, request: pb.TokenizeRequest, grpc_context: RayServegRPCContext
    ) -> pb.TokenizeResponse:
        try:
            return await self._servicer.tokenize(request)
        except RequestError as error:
            _fail(grpc_context, error)
            raise

    async def Check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        ready = self._router.ready()
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status)

    async def __del__(self) -> None:
        await self._router.stop()

    def _metrics_targets(self) -> str:
        """Prometheus HTTP service discovery: every pool replica's metrics address, labelled."""
        return json.dumps(
            [
                {"targets": [info.metrics_address], "labels": {"model": info.model, "pool": info.pool}}
                for info in self._router.replicas()
            ]
        )


def _metadata(context: RayServegRPCContext) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}


def _fail(context: Any, error: RequestError) -> None:
    code, details = grpc_status(error)
    context.set_code(code)
    context.set_details(details)
