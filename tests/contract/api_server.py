"""The HTTP API on a real port of this process, for true streaming and true disconnects."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx2
import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI

from cluster.transport.backend import InferenceBackend
from cluster.transport.openai_api import create_app


def serving(backend: InferenceBackend) -> AbstractAsyncContextManager[str]:
    """The base address of a server of the public API that runs inside the block."""
    return serving_app(create_app(lambda: backend))


@asynccontextmanager
async def serving_app(app: FastAPI) -> AsyncIterator[str]:
    """The base address of a server that runs inside the block."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # connections queue from here on, so nobody has to wait for the server to be up
        config = uvicorn.Config(app, lifespan="off", ws="none", log_level="error")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            server.force_exit = True
            await task


@asynccontextmanager
async def openai_client(backend: InferenceBackend) -> AsyncIterator[AsyncOpenAI]:
    """The real client, without retries and without a network."""
    transport = httpx2.ASGITransport(create_app(lambda: backend), raise_app_exceptions=False)
    http_client = httpx2.AsyncClient(transport=transport)
    async with AsyncOpenAI(
        base_url="http://test/v1", api_key="unused", max_retries=0, http_client=http_client
    ) as client:
        yield client


@asynccontextmanager
async def connected_client(backend: InferenceBackend) -> AsyncIterator[AsyncOpenAI]:
    """The real client of a real server."""
    async with (
        serving(backend) as address,
        AsyncOpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client
