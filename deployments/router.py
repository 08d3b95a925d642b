"""The ingress: HTTP and gRPC clients come in here, rounds go out to the pools."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
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
from cluster.router.request_log import REQUEST_LOGGER
from cluster.router.router import Router
from cluster.runtime.model_store import resolve_model
from cluster.tokenizer import Tokenizer
from cluster.transport.inference_servicer import InferenceServicer, grpc_status, policy_metadata
from cluster.transport.openai_api import ApiOptions, create_app
from deployments.discovery import discover_from
from protos.paceline.v1 import inference_pb2 as pb


@serve.ingress()
class RouterReplica:
    """One ingress replica: the router, and the two public APIs in front of it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits constructors
        self, config: ClusterConfig, pools: Mapping[str, DeploymentHandle]
    ) -> None:
        _log_requests()
        self._registry = CollectorRegistry()
        tokenizers = {model.name: Tokenizer.load(resolve_model(model.target.path)) for model in config.models}
        self._router = Router(
            config, tokenizers, discover=discover_from(list(pools.values())), observer=RouterMetrics(self._registry)
        )
        self._servicer = InferenceServicer(lambda: self._router)
        await self._router.start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        options = ApiOptions(metrics=lambda: generate_latest(self._registry), service_discovery=self._metrics_targets)
        app = create_app(lambda: self._router, options)
        app.add_api_route("/status", lambda: asdict(self._router.status()), methods=["GET"])
        return app

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        try:
            async with aclosing(self._servicer.generate(request, _metadata(grpc_context))) as responses:
                async for response in responses:
                    if metadata := policy_metadata(response):
                        grpc_context.set_trailing_metadata(list(metadata))
                    yield response
        except RequestError as error:
            _fail(grpc_context, error)
            raise

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: RayServegRPCContext) -> pb.TokenizeResponse:
        try:
            return await self._servicer.tokenize(request, _metadata(grpc_context))
        except RequestError as error:
            _fail(grpc_context, error)
            raise

    async def Check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        ready = self._router.ready()
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status)

    async def __del__(self) -> None:
        await self._router.stop()

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


def _metadata(context: RayServegRPCContext) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}


def _fail(context: Any, error: RequestError) -> None:
    status = grpc_status(error)
    context.set_code(status.code)
    context.set_details(status.details)
    context.set_trailing_metadata(list(status.trailing_metadata))
