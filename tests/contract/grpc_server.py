"""The gRPC inference service on a real port of this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from cluster.transport.backend import InferenceBackend
from cluster.transport.inference_servicer import GrpcInferenceServicer, InferenceServicer
from protos.paceline.v1 import inference_pb2_grpc


@asynccontextmanager
async def inference_stub(backend: InferenceBackend) -> AsyncIterator[inference_pb2_grpc.InferenceServiceStub]:
    """A client of a server that runs inside the block."""
    server = grpc.aio.server()
    servicer = GrpcInferenceServicer(InferenceServicer(lambda: backend))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield inference_pb2_grpc.InferenceServiceStub(channel)
    finally:
        await server.stop(None)
