"""Errors of an HTTP application, as the `openai` client expects them: a status, headers, and an error object."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

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
    ErrorKind.NOT_FOUND: _Answer(404, "invalid_request_error", "not_found"),
    ErrorKind.CONFLICT: _Answer(409, "conflict_error", "conflict"),
    ErrorKind.OVERLOADED: _Answer(429, "rate_limit_error", "rate_limit_exceeded"),
    ErrorKind.UNAVAILABLE: _Answer(503, "server_error", "unavailable"),
    ErrorKind.DEADLINE: _Answer(504, "timeout_error", "deadline_exceeded"),
    ErrorKind.INTERNAL: _Answer(500, "server_error", "internal_error"),
}

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def error_body(error: RequestError) -> dict[str, object]:
    """The body of an error answer, or of an error event in a stream that has begun."""
    error_type = _ANSWERS[error.kind].type
    return {"error": {"message": error.message, "type": error_type, "param": error.param, "code": _code(error)}}


def _code(error: RequestError) -> str:
    if isinstance(error, InvalidRequest):
        return error.code.value
    if error.kind is ErrorKind.NOT_FOUND and error.param == "model":
        return "model_not_found"
    return _ANSWERS[error.kind].code


def error_response(error: RequestError) -> Response:
    return JSONResponse(error_body(error), _ANSWERS[error.kind].status, _headers(error))


def add_error_handlers(app: FastAPI) -> None:
    """Give every error of an application this form."""
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected_error)


async def _on_request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return http_error_response(error.status_code, str(error.detail))


async def _on_disconnect(_: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; access logs show why the request ended


async def _on_unexpected_error(_: Request, error: Exception) -> Response:
    """The server logs the exception itself after this answer."""
    return error_response(RequestError(ErrorKind.INTERNAL, "Internal error"))


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
