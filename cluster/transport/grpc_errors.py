"""Errors of gRPC calls: how a RequestError ends a call, and what a call that failed means."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from cluster.messages.answer import ErrorKind, RequestError

Context = grpc.aio.ServicerContext[Message, Message]

_RETRY_AFTER = "retry-after"
MAX_DETAILS_BYTES = 4096  # as they travel; a peer may refuse an answer whose metadata has more than 8 KiB

_CODES = {
    ErrorKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.CONTEXT_LENGTH: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorKind.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    ErrorKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorKind.CONFLICT: grpc.StatusCode.ABORTED,
    ErrorKind.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorKind.INTERNAL: grpc.StatusCode.INTERNAL,
}
_KINDS = {code: kind for kind, code in _CODES.items()} | {grpc.StatusCode.INVALID_ARGUMENT: ErrorKind.INVALID}

_CUT = " ... (the rest is left out)"


@dataclass(frozen=True, slots=True)
class GrpcStatus:
    """How a failed call ends."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str], ...] = ()


def grpc_status(error: RequestError) -> GrpcStatus:
    """The call's end; a time to wait travels as the trailing metadata `retry-after`, in whole seconds."""
    wait_s = error.retry_after_s
    trailing = () if wait_s is None else ((_RETRY_AFTER, str(max(1, math.ceil(wait_s)))),)
    return GrpcStatus(_CODES[error.kind], _fitting(error.message), trailing)


def _fitting(message: str) -> str:
    """The message, cut where it is too long for an answer's metadata."""
    size = 0
    for index, char in enumerate(message):
        size += 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode(errors="replace"))
        if size > MAX_DETAILS_BYTES:
            return f"{message[: max(0, index - len(_CUT))]}{_CUT}"
    return message


def request_error(error: grpc.aio.AioRpcError) -> RequestError:
    """What a failed call means to its caller: the error that ended it at the other end, or UNAVAILABLE, or INTERNAL."""
    trailing: Any = error.trailing_metadata() or ()
    wait_s = dict(trailing).get(_RETRY_AFTER)
    retry_after_s = float(wait_s) if isinstance(wait_s, str) and wait_s.isdecimal() else None
    kind = _KINDS.get(error.code(), ErrorKind.INTERNAL)
    return RequestError(kind, error.details() or error.code().name, retry_after_s=retry_after_s)


def call_metadata(context: Context) -> dict[str, str]:
    """A call's metadata by lower-case name, without what is binary."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


@asynccontextmanager
async def ending_calls(context: Context) -> AsyncIterator[None]:
    """A RequestError inside ends the call with its status."""
    try:
        yield
    except RequestError as error:
        status = grpc_status(error)
        await context.abort(status.code, status.details, status.trailing_metadata)
