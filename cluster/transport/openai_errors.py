"""Errors as the `openai` client expects them: a status, headers, and an error object."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from cluster.messages.answer import ErrorKind, RequestError
from cluster.transport.validation import InvalidRequest


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    type: str
    code: str


_ANSWERS = {
    ErrorKind.INVALID: _Answer(400, "invalid_request_error", "invalid_value"),
    ErrorKind.CONTEXT_LENGTH: _Answer(400, "invalid_request_error", "context_length_exceeded"),
    ErrorKind.UNAUTHENTICATED: _Answer(401, "authentication_error", "invalid_api_key"),
    ErrorKind.FORBIDDEN: _Answer(403, "permission_error", "forbidden"),
    ErrorKind.NOT_FOUND: _Answer(404, "invalid_request_error", "model_not_found"),
    ErrorKind.CONFLICT: _Answer(409, "conflict_error", "conflict"),
    ErrorKind.OVERLOADED: _Answer(429, "rate_limit_error", "rate_limit_exceeded"),
    ErrorKind.UNAVAILABLE: _Answer(503, "server_error", "unavailable"),
    ErrorKind.DEADLINE: _Answer(504, "timeout_error", "deadline_exceeded"),
    ErrorKind.INTERNAL: _Answer(500, "server_error", "internal_error"),
}

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def error_body(error: RequestError) -> dict[str, object]:
    """The body of an error answer, or of an error event in a stream that has begun."""
    answer = _ANSWERS[error.kind]
    code = error.code.value if isinstance(error, InvalidRequest) else answer.code
    return {"error": {"message": error.message, "type": answer.type, "param": error.param, "code": code}}


def error_response(error: RequestError) -> Response:
    return JSONResponse(error_body(error), _ANSWERS[error.kind].status, _headers(error))


async def on_request_error(_: Request, error: Exception) -> Response:
    """An application's handler of RequestError."""
    assert isinstance(error, RequestError)
    return error_response(error)


def _headers(error: RequestError) -> dict[str, str]:
    if error.kind is ErrorKind.DEADLINE:  # the client library would otherwise spend the same time again, twice
        return {"x-should-retry": "false"}
    wait_s = error.retry_after_s
    if wait_s is None and error.kind is ErrorKind.OVERLOADED:
        wait_s = 1.0
    if wait_s is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(max(1, math.ceil(wait_s * 1000)))}


def http_error_response(status: int, message: str) -> Response:
    """For what is wrong with the HTTP request itself: route, method, size."""
    code = _HTTP_CODES.get(status, "http_error")
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return JSONResponse(body, status)
