"""Output streams as both public APIs consume them: every end that is no answer becomes a RequestError."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace

from cluster.messages.answer import ErrorKind, FinishReason, RequestError, TokenDelta
from cluster.messages.request import GenerateRequest
from cluster.transport.backend import InferenceBackend

logger = logging.getLogger(__name__)

_FAILURES = {
    FinishReason.CANCELLED: (ErrorKind.UNAVAILABLE, "The request was cancelled by the server; send it again"),
    FinishReason.DEADLINE: (ErrorKind.DEADLINE, "The request's deadline passed before its output was complete"),
    FinishReason.ERROR: (ErrorKind.INTERNAL, "The request failed"),
}


@contextmanager
def internal_errors(what: str) -> Iterator[None]:
    """An unexpected exception is logged here, once, and becomes RequestError(INTERNAL) without its text."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        logger.exception("%s failed", what)
        raise RequestError(ErrorKind.INTERNAL, f"Internal error in {what}") from error


async def output(backend: InferenceBackend, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
    """The deltas of one request, ending with finish reason STOP or LENGTH; RequestError for any other end."""
    with internal_errors(f"request {request.request_id}"):
        async with aclosing(backend.generate(request)) as deltas:
            async for delta in deltas:
                if delta.finish_reason in _FAILURES:
                    if delta.token_ids or delta.text:
                        yield replace(delta, finish_reason=None, stats=None)
                    raise RequestError(*_FAILURES[delta.finish_reason])
                yield delta
                if delta.finish_reason is not None:
                    return
        raise RuntimeError("the output ended without a finish reason")


async def outputs(
    backend: InferenceBackend, requests: Sequence[GenerateRequest]
) -> AsyncGenerator[tuple[int, TokenDelta], None]:
    """The deltas of several requests as they come, each with its request's index; one error ends them all."""
    if len(requests) > 1:
        backend.check_together(requests)
        async with aclosing(_interleaved(backend, requests)) as indexed:
            async for item in indexed:
                yield item
        return
    async with aclosing(output(backend, requests[0])) as deltas:
        async for delta in deltas:
            yield 0, delta


async def _interleaved(
    backend: InferenceBackend, requests: Sequence[GenerateRequest]
) -> AsyncGenerator[tuple[int, TokenDelta], None]:
    queue: asyncio.Queue[tuple[int, TokenDelta] | RequestError] = asyncio.Queue(maxsize=len(requests))
    tasks = [asyncio.create_task(_pump(backend, request, index, queue)) for index, request in enumerate(requests)]
    unfinished = len(requests)
    try:
        while unfinished:
            item = await queue.get()
            if isinstance(item, RequestError):
                raise item
            unfinished -= item[1].finish_reason is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    backend: InferenceBackend,
    request: GenerateRequest,
    index: int,
    queue: asyncio.Queue[tuple[int, TokenDelta] | RequestError],
) -> None:
    try:
        async with aclosing(output(backend, request)) as deltas:
            async for delta in deltas:
                await queue.put((index, delta))
    except RequestError as error:
        await queue.put(error)
