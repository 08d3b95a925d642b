"""The HTTP connection of a request: its body, and answers that end when the client has gone."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send


async def read_body(request: Request, limit: int) -> bytes:
    """The body, at most `limit` bytes. Raises HTTPException(413), without reading more than that."""
    declared = request.headers.get("content-length", "0")
    body = bytearray()
    if not declared.isdecimal() or int(declared) <= limit:
        async for part in request.stream():
            body += part
            if len(body) > limit:
                break
        else:
            return bytes(body)
    raise HTTPException(413, f"The request body is larger than the limit of {limit} bytes")


class WhileConnected(Response):
    """Owns the task that answers a request, and cancels it as soon as the client has gone.

    The task is cancelled wherever it waits, so this works while no token flows. The request's body must have been read.
    """

    def __init__(self, answer: ASGIApp) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.ensure_future(self._answer(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answer.cancel()
            gone.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)
        for task in (answer, gone):
            if not task.cancelled():
                task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
