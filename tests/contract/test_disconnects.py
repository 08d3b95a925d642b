"""First tokens leave at once, and a client that goes away cancels its request at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.types import Message

from cluster.transport.openai_api import create_app
from tests.contract.api_server import connected_client, serving
from tests.fakes import FakeBackend

pytestmark = pytest.mark.contract

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "demo", "prompt": "x"},
}


async def closed(backend: FakeBackend, times: int = 1) -> None:
    """Returns when the backend has seen that many streams closed; fails after far longer than that may take."""
    async with asyncio.timeout(5):
        for _ in range(times):
            await backend.closed.get()


@asynccontextmanager
async def posting(backend: FakeBackend, path: str, body: dict[str, object]) -> AsyncIterator[asyncio.Task[None]]:
    """A POST in flight, whose backend has got as far as waiting."""
    async with serving(backend) as address, httpx.AsyncClient(base_url=address) as client:
        task = asyncio.create_task(client.post(path, json=body))
        async with asyncio.timeout(5):
            await backend.waiting.wait()
        yield task


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_leaves_before_the_first_token_cancels_its_request(path: str, stream: bool) -> None:
    backend = FakeBackend(script=(None,))
    async with posting(backend, path, BODIES[path] | {"stream": stream}) as task:
        task.cancel()
        await closed(backend)


async def test_a_client_that_leaves_between_tokens_cancels_its_request() -> None:
    backend = FakeBackend(script=("Hello", None))
    async with connected_client(backend) as client:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        await anext(stream)
        await stream.close()
        await closed(backend)


async def test_the_first_token_arrives_while_the_second_is_awaited() -> None:
    backend = FakeBackend(script=("Hello", None))
    async with connected_client(backend) as client:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        async with asyncio.timeout(5):
            texts = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
        assert texts == ["", "Hello"]
        await stream.close()


async def test_a_client_that_leaves_a_batch_cancels_every_prompt() -> None:
    backend = FakeBackend(script=("Hello", None))
    async with posting(backend, "/v1/completions", {"model": "demo", "prompt": ["a", "b", "c"]}) as task:
        task.cancel()
        await closed(backend, times=3)


class Connection:
    """Owns the ASGI ends of one request: what it sends, and when its client goes."""

    def __init__(self, body: dict[str, object]) -> None:
        self.gone = asyncio.Event()
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self._body: bytes | None = json.dumps(body).encode()

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.put_nowait(message)

    def run(self, backend: FakeBackend, path: str) -> asyncio.Task[None]:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [],
        }
        return asyncio.ensure_future(create_app(lambda: backend)(scope, self.receive, self.send))


@pytest.mark.parametrize("num_parts", [0, 1, 2])
async def test_the_disconnect_message_ends_the_request_wherever_it_waits(num_parts: int) -> None:
    backend = FakeBackend(script=(*["a"] * num_parts, None))
    connection = Connection(CHAT | {"stream": True})
    task = connection.run(backend, "/v1/chat/completions")
    await backend.waiting.wait()
    assert backend.closed.empty()
    connection.gone.set()
    await task
    assert backend.closed.qsize() == 1


async def test_each_delta_is_one_body_message() -> None:
    connection = Connection(CHAT | {"stream": True})
    await connection.run(FakeBackend(script=("a", "b")), "/v1/chat/completions")
    start, *bodies = [connection.sent.get_nowait() for _ in range(connection.sent.qsize())]
    assert start["type"] == "http.response.start"
    assert [body["body"].count(b"data: ") for body in bodies] == [2, 2, 1, 0]
    assert [body["more_body"] for body in bodies] == [True, True, True, False]


async def test_a_server_that_cancels_the_handler_cancels_the_request() -> None:
    backend = FakeBackend(script=("a", None))
    task = Connection(CHAT | {"stream": True}).run(backend, "/v1/chat/completions")
    await backend.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.closed.qsize() == 1


async def test_a_client_that_leaves_while_sending_its_body_starts_nothing() -> None:
    backend = FakeBackend()
    connection = Connection(CHAT)
    connection._body = None
    connection.gone.set()
    await connection.run(backend, "/v1/chat/completions")
    assert backend.requests == []
