"""Sending one OpenAI-style answer: whole, or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from fastapi.responses import Response
from openai.types import CompletionUsage
from starlette.types import Receive, Scope, Send

from cluster.messages.answer import PolicyStamp, RequestError
from cluster.messages.request import GenerateRequest
from cluster.transport.backend import InferenceBackend
from cluster.transport.generation import outputs
from cluster.transport.openai_errors import error_body, error_response
from cluster.transport.openai_objects import Answer, ChoiceOutput, to_json, usage
from cluster.transport.policy_headers import policy_headers

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # reverse proxies would hold events back to fill their buffers
}


class _Events(NamedTuple):
    """What one delta sends, and the decision that was in force."""

    data: bytes
    policy: PolicyStamp | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer to be generated; each of its methods is an ASGI application that generates and sends it once."""

    answer: Answer
    backend: InferenceBackend
    requests: tuple[GenerateRequest, ...]  # one for each choice
    num_per_prompt: int  # that many in a row have the same prompt
    include_usage: bool

    async def send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            choices = await self._collect()
        except RequestError as error:
            await error_response(error)(scope, receive, send)
            return
        total = self._usage([choice.num_tokens for choice in choices], [choice.num_cached_tokens for choice in choices])
        headers = {"x-request-id": self.answer.identity.id} | policy_headers(choices[0].policy)
        body = to_json(self.answer.whole(choices, total))
        await Response(body, 200, headers, "application/json")(scope, receive, send)

    async def send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The status goes out with the first event, so that a request that is refused gets a status of its own."""
        async with aclosing(self._events()) as events:
            try:
                first = await anext(events)
            except RequestError as error:
                await error_response(error)(scope, receive, send)
                return
            headers = self._stream_headers(first.policy)
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send(_part(first.data))
            try:
                async for events_of_delta in events:
                    await send(_part(events_of_delta.data))
            except RequestError as error:
                await send(_part(_event(json.dumps(error_body(error)).encode())))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _collect(self) -> list[ChoiceOutput]:
        choices = [ChoiceOutput() for _ in self.requests]
        async with aclosing(outputs(self.backend, self.requests)) as deltas:
            async for index, delta in deltas:
                choices[index].add(delta)
        return choices

    async def _events(self) -> AsyncGenerator[_Events, None]:
        """Server-sent events, those of one delta together; never empty."""
        completion_tokens, cached_tokens = [0] * len(self.requests), [0] * len(self.requests)
        async with aclosing(outputs(self.backend, self.requests)) as deltas:
            async for index, delta in deltas:
                completion_tokens[index] += len(delta.token_ids)
                if delta.stats is not None:
                    cached_tokens[index] = delta.stats.num_cached_tokens
                if events := b"".join(_event(to_json(chunk)) for chunk in self.answer.chunks(index, delta)):
                    yield _Events(events, delta.policy)
        if self.include_usage:
            chunk = self.answer.usage_chunk(self._usage(completion_tokens, cached_tokens))
            yield _Events(_event(to_json(chunk)))
        yield _Events(_event(b"[DONE]"))

    def _usage(self, completion_tokens: Sequence[int], cached_tokens: Sequence[int]) -> CompletionUsage:
        """Of figures for each choice. A prompt counts once, as its luckiest choice found it in the cache."""
        first_choices = range(0, len(self.requests), self.num_per_prompt)
        prompt_tokens = sum(len(self.requests[first].prompt_token_ids) for first in first_choices)
        cached = sum(max(cached_tokens[first : first + self.num_per_prompt]) for first in first_choices)
        return usage(prompt_tokens, sum(completion_tokens), cached)

    def _stream_headers(self, policy: PolicyStamp | None) -> list[tuple[bytes, bytes]]:
        headers = STREAM_HEADERS | {"x-request-id": self.answer.identity.id} | policy_headers(policy)
        return [(name.encode(), value.encode()) for name, value in headers.items()]


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _part(body: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": True}
