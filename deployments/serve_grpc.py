"""gRPC calls as Serve's proxy hands them to a replica: their metadata, and how a RequestError ends one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from google.protobuf.message import Message

from cluster.messages.answer import RequestError
from cluster.transport.generation import internal_errors
from cluster.transport.grpc_errors import grpc_status

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply")


def call_metadata(context: Any) -> dict[str, str]:
    """A call's metadata by lower-case name, without what is binary."""
    return {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}


@contextmanager
def ending_calls(context: Any) -> Iterator[None]:
    """A RequestError inside ends the call with its status."""
    try:
        yield
    except RequestError as error:
        status = grpc_status(error)
        context.set_code(status.code)
        context.set_details(status.details)
        context.set_trailing_metadata(list(status.trailing_metadata))
        raise


async def answer(
    method: Callable[[Request, Mapping[str, str]], Awaitable[Reply]], request: Request, context: Any
) -> Reply:
    """Run a method of a servicer for one call."""
    with ending_calls(context), internal_errors(type(request).__name__):
        return await method(request, call_metadata(context))
