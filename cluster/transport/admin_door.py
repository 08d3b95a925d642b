"""Who gets into the admin API, and with how much: checked before anything that a caller sends is looked at."""

from __future__ import annotations

from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.control.store import MAX_TEXT_BYTES
from cluster.messages.answer import RequestError
from cluster.transport.admin_token import AUTHORIZATION, AdminToken
from cluster.transport.connection import read_body
from cluster.transport.openai_errors import error_response, http_error_response

MAX_BODY_BYTES: Final = 6 * MAX_TEXT_BYTES + 64 * 1024  # JSON may write each byte of a document as six


class AdminDoor:
    """Owns the way into an application: without the token nobody gets in, and nobody with more than MAX_BODY_BYTES."""

    def __init__(self, app: ASGIApp, token: AdminToken, open_path: str) -> None:
        """`open_path` is the one path inside the application that is everybody's."""
        self._app = app
        self._token = token
        self._open_path = open_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open(scope):
            request = Request(scope, receive)
            try:
                self._token.check(request.headers.get(AUTHORIZATION))
                body = await read_body(request, MAX_BODY_BYTES)
            except RequestError as error:
                return await error_response(error)(scope, receive, send)
            except HTTPException as error:
                return await http_error_response(error.status_code, str(error.detail))(scope, receive, send)
            receive = _again(body, receive)
        return await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return bool(scope["path"].removeprefix(scope.get("root_path", "")) == self._open_path)


def _again(body: bytes, receive: Receive) -> Receive:
    """A body that has been read, to be read once more; then what comes after it."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
