"""The HTTP API as the `openai` client sees it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TypeVar

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from cluster.messages.answer import ErrorKind, FinishReason, PolicyStamp, RequestError
from cluster.messages.request import Drafter, SpeculationOverride
from cluster.transport.openai_api import ApiOptions, create_app
from tests.contract.api_server import openai_client, serving
from tests.fakes import FakeBackend, byte_tokenizer

pytestmark = pytest.mark.contract

Chunk = TypeVar("Chunk", Completion, ChatCompletionChunk)
HI = [{"role": "user", "content": "hi"}]
PROMPT_TOKENS = len(byte_tokenizer().apply_chat_template(HI))


async def stream_chunks(backend: FakeBackend, **options: object) -> list[ChatCompletionChunk]:
    async with openai_client(backend) as client:
        stream = await client.chat.completions.create(model="demo", messages=HI, stream=True, **options)
        return [chunk async for chunk in stream]


async def raw_events(backend: FakeBackend, path: str, body: dict[str, object]) -> list[str]:
    """The data of every server-sent event."""
    async with serving(backend) as address, httpx.AsyncClient(base_url=address) as client:
        answer = await client.post(path, json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.endswith("\n\n")
    return [event.removeprefix("data: ") for event in answer.text.removesuffix("\n\n").split("\n\n")]


async def until_error(stream: AsyncIterator[Chunk]) -> tuple[list[Chunk], openai.APIError]:
    """What a stream sends, and the error that ends it."""
    chunks: list[Chunk] = []
    try:
        async for chunk in stream:
            chunks.append(chunk)  # noqa: PERF401 - what came before the error counts
    except openai.APIError as error:
        return chunks, error
    pytest.fail("the stream ended without an error")


# --- policy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "a"})]
)
async def test_answers_say_which_policy_they_followed(is_stream: bool, path: str, body: dict[str, object]) -> None:
    backend = FakeBackend(policy=PolicyStamp(7, "canary", "rule", "acme"))
    async with serving(backend) as address, httpx.AsyncClient(base_url=address) as client:
        answer = await client.post(path, json={"model": "demo", "stream": is_stream, **body})
        plain = await client.post(path, json={"model": "nobody", **body})
    assert answer.status_code == 200
    assert answer.headers["x-paceline-variant"] == "canary"
    assert answer.headers["x-paceline-policy-version"] == "7"
    assert "x-paceline-variant" not in plain.headers


async def test_the_user_is_the_bodys_or_else_the_headers() -> None:
    backend = FakeBackend()
    async with openai_client(backend) as client:
        for options in ({}, {"user": "bob"}, {"user": ""}):
            await client.chat.completions.create(
                model="demo",
                messages=HI,
                extra_headers={"X-Paceline-User": "alice", "X-Paceline-Session": "s-1"},
                **options,
            )
    assert [seen.user for seen in backend.requests] == ["alice", "bob", "alice"]
    assert {seen.session for seen in backend.requests} == {"s-1"}


# --- chat ------------------------------------------------------------------------------------------------------------


async def test_a_chat_answer_has_text_finish_reason_and_usage() -> None:
    async with openai_client(FakeBackend()) as client:
        answer = await client.chat.completions.create(model="demo", messages=HI)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer._request_id == answer.id
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello, world!")
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == PROMPT_TOKENS
    assert answer.usage.completion_tokens == 13
    assert answer.usage.total_tokens == PROMPT_TOKENS + 13


async def test_a_stream_is_role_content_finish_and_nothing_else() -> None:
    chunks = await stream_chunks(FakeBackend())
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [(delta.role, delta.content) for delta in deltas] == [
        ("assistant", ""),
        (None, "Hello"),
        (None, ", world"),
        (None, "!"),
        (None, None),
    ]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, None, "stop"]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


async def test_the_usage_chunk_has_no_choices_and_comes_last() -> None:
    *others, last = await stream_chunks(FakeBackend(), stream_options={"include_usage": True})
    assert all(chunk.choices and chunk.usage is None for chunk in others)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (PROMPT_TOKENS, 13)


async def test_a_stream_ends_with_done() -> None:
    events = await raw_events(FakeBackend(), "/v1/chat/completions", {"model": "demo", "messages": HI, "stream": True})
    assert events[-1] == "[DONE]"
    assert json.loads(events[0])["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert json.loads(events[-2])["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }


async def test_the_length_limit_is_a_finish_reason() -> None:
    chunks = await stream_chunks(FakeBackend(finish_reason=FinishReason.LENGTH))
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_chat_logprobs_have_bytes_and_alternatives() -> None:
    async with openai_client(FakeBackend(script=("é",))) as client:
        answer = await client.chat.completions.create(model="demo", messages=HI, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [item.bytes for item in content] == [[0xC3], [0xA9]]
    assert [item.token for item in content] == ["\ufffd", "\ufffd"]
    assert [[top.logprob for top in item.top_logprobs] for item in content] == [[-0.5, -1.5]] * 2


async def test_streamed_logprobs_come_with_their_tokens() -> None:
    chunks = await stream_chunks(FakeBackend(script=("ab", "c")), logprobs=True)
    found = [item.token for chunk in chunks if chunk.choices[0].logprobs for item in chunk.choices[0].logprobs.content]
    assert found == ["a", "b", "c"]


async def test_the_model_reads_the_conversation_through_its_template() -> None:
    backend = FakeBackend()
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    async with openai_client(backend) as client:
        await client.chat.completions.create(model="demo", messages=messages)
    text = byte_tokenizer().decode(backend.requests[0].prompt_token_ids)
    assert text == "system\nbe brief\nuser\nab\nassistant\n"


async def test_an_answer_can_be_sent_back_as_it_came() -> None:
    async with openai_client(FakeBackend()) as client:
        answer = await client.chat.completions.create(model="demo", messages=HI)
        history = [*HI, answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
        again = await client.chat.completions.create(model="demo", messages=history)
    assert again.choices[0].finish_reason == "stop"


async def test_every_parameter_reaches_the_backend() -> None:
    backend = FakeBackend()
    async with openai_client(backend) as client:
        await client.chat.completions.create(
            model="demo",
            messages=HI,
            max_completion_tokens=7,
            temperature=0,
            top_p=0.5,
            seed=-1,
            stop=["END", "END", "!!"],
            logprobs=True,
            extra_body={
                "top_k": 5,
                "min_p": 0.1,
                "ignore_eos": True,
                "stop_token_ids": [3, 4],
                "timeout_s": 2.5,
                "speculation": {"enabled": True, "max_draft_tokens": 3, "drafter": "ngram"},
            },
            extra_headers={"X-Paceline-Tenant": "team-a", "X-Paceline-Workload": "code.review"},
        )
    [request] = backend.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.0, 0.5, 5)
    assert (sampling.min_p, sampling.seed, sampling.stop) == (0.1, 2**64 - 1, ("END", "!!"))
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.num_logprobs) == ((3, 4), True, 0)
    assert (request.tenant, request.workload, request.deadline_s) == ("team-a", "code.review", 2.5)
    assert request.speculation == SpeculationOverride(True, 3, Drafter.NGRAM)


async def test_what_a_request_leaves_out_has_defaults() -> None:
    backend = FakeBackend()
    async with openai_client(backend) as client:
        await client.chat.completions.create(model="demo", messages=HI)
        await client.chat.completions.create(model="demo", messages=HI)
    first, second = (request.sampling for request in backend.requests)
    assert first.max_tokens == backend.max_len - PROMPT_TOKENS
    assert (first.temperature, first.top_p, first.top_k, first.min_p, first.stop) == (1.0, 1.0, None, 0.0, ())
    assert first.seed != second.seed
    assert backend.requests[0].tenant == backend.requests[0].workload == "default"
    assert backend.requests[0].speculation == SpeculationOverride()


async def test_hints_that_change_nothing_are_accepted() -> None:
    async with openai_client(FakeBackend()) as client:
        answer = await client.chat.completions.create(
            model="demo",
            messages=HI,
            user="u",
            metadata={"k": "v"},
            store=False,
            service_tier="auto",
            n=1,
            presence_penalty=0,
            frequency_penalty=0.0,
            logit_bias={},
            tools=[],
            response_format={"type": "text"},
            prompt_cache_key="k",
            safety_identifier="s",
            extra_body={"stream_options": {"include_usage": True}, "modalities": ["text"]},
        )
    assert answer.choices[0].message.content == "Hello, world!"


# --- completions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["abc", [65, 66, 67], ["abc"], [[65, 66, 67]]])
async def test_one_prompt_may_be_a_string_token_ids_or_a_list_of_one(prompt: object) -> None:
    backend = FakeBackend()
    async with openai_client(backend) as client:
        answer = await client.completions.create(model="demo", prompt=prompt)
    assert answer.object == "text_completion"
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (0, "Hello, world!", "stop")
    ]
    assert len(backend.requests[0].prompt_token_ids) == 3
    assert backend.requests[0].sampling.max_tokens == 16
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 13)


async def test_a_batch_of_prompts_gives_a_choice_for_each() -> None:
    backend = FakeBackend()
    async with openai_client(backend) as client:
        answer = await client.completions.create(model="demo", prompt=["a", [65, 66], "ccc"][::2], max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len({request.request_id for request in backend.requests}) == 2
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 26)


async def test_a_streamed_batch_tells_its_choices_apart() -> None:
    async with openai_client(FakeBackend()) as client:
        stream = await client.completions.create(
            model="demo", prompt=["a", "b"], stream=True, stream_options={"include_usage": True}
        )
        chunks: list[Completion] = [chunk async for chunk in stream]
    *parts, last = chunks
    for index in (0, 1):
        mine = [chunk.choices[0] for chunk in parts if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in mine) == "Hello, world!"
        assert [choice.finish_reason for choice in mine] == [None, None, None, "stop"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 26


async def test_one_failed_prompt_fails_the_batch_and_closes_the_others() -> None:
    backend = FakeBackend(script=("a", RequestError(ErrorKind.UNAVAILABLE, "no target")))
    async with openai_client(backend) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="demo", prompt=["a", "b", "c"])
    assert caught.value.status_code == 503
    assert backend.closed.qsize() == 3


async def test_completion_logprobs_have_offsets_into_the_text() -> None:
    async with openai_client(FakeBackend(script=("a", "é", "b"))) as client:
        answer = await client.completions.create(model="demo", prompt="x", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.top_logprobs is not None
    assert all(
        top[token] == -0.5 and len(top) == 2 for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True)
    )


async def test_streamed_offsets_go_on_where_the_last_chunk_ended() -> None:
    async with openai_client(FakeBackend(script=("ab", "cd"))) as client:
        stream = await client.completions.create(model="demo", prompt="x", logprobs=0, stream=True)
        chunks = [chunk async for chunk in stream]
    offsets = [chunk.choices[0].logprobs.text_offset for chunk in chunks if chunk.choices[0].logprobs]
    assert offsets == [[0, 1], [2, 3]]


async def test_a_stop_string_ends_the_text_before_it() -> None:
    async with openai_client(FakeBackend()) as client:
        answer = await client.completions.create(model="demo", prompt="x", stop="wor")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello, ", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10


# --- failures --------------------------------------------------------------------------------------------------------

FAILURES = [
    (RequestError(ErrorKind.OVERLOADED, "busy", retry_after_s=2.2), 429, "rate_limit_error", "rate_limit_exceeded"),
    (RequestError(ErrorKind.UNAVAILABLE, "no target"), 503, "server_error", "unavailable"),
    (RequestError(ErrorKind.DEADLINE, "too late"), 504, "timeout_error", "deadline_exceeded"),
    (RequestError(ErrorKind.INTERNAL, "broken"), 500, "server_error", "internal_error"),
    (RequestError(ErrorKind.INVALID, "no", "top_k"), 400, "invalid_request_error", "invalid_value"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "kind", "code"), FAILURES)
async def test_a_refused_request_has_its_own_status(
    error: RequestError, status: int, kind: str, code: str, stream: bool
) -> None:
    async with openai_client(FakeBackend(script=(error,))) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="demo", messages=HI, stream=stream)
    assert caught.value.status_code == status
    assert caught.value.body == {"message": error.message, "type": kind, "param": error.param, "code": code}


async def test_overload_says_when_to_come_back() -> None:
    backend = FakeBackend(script=(RequestError(ErrorKind.OVERLOADED, "busy", retry_after_s=2.2),))
    async with openai_client(backend) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="demo", messages=HI)
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.response.headers["retry-after-ms"] == "2200"


async def test_a_request_that_failed_late_is_an_error_event_and_the_stream_ends() -> None:
    backend = FakeBackend(script=("Hel", RequestError(ErrorKind.UNAVAILABLE, "no target")))
    async with openai_client(backend) as client:
        stream = await client.chat.completions.create(model="demo", messages=HI, stream=True)
        chunks, error = await until_error(stream)
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "Hel"]
    assert (error.message, error.code) == ("no target", "unavailable")


async def test_no_done_follows_an_error_event() -> None:
    backend = FakeBackend(script=("a", RequestError(ErrorKind.INTERNAL, "broken")))
    events = await raw_events(backend, "/v1/completions", {"model": "demo", "prompt": "x", "stream": True})
    assert json.loads(events[-1])["error"]["message"] == "broken"


@pytest.mark.parametrize(
    ("reason", "status"), [(FinishReason.DEADLINE, 504), (FinishReason.CANCELLED, 503), (FinishReason.ERROR, 500)]
)
async def test_an_output_that_was_cut_off_is_an_error(reason: FinishReason, status: int) -> None:
    async with openai_client(FakeBackend(finish_reason=reason)) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="demo", messages=HI)
    assert caught.value.status_code == status


async def test_text_that_came_before_the_deadline_is_still_streamed() -> None:
    async with openai_client(FakeBackend(finish_reason=FinishReason.DEADLINE)) as client:
        stream = await client.completions.create(model="demo", prompt="x", stream=True)
        chunks, error = await until_error(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello, world!"
    assert error.code == "deadline_exceeded"


async def test_an_unexpected_exception_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    async with openai_client(FakeBackend(script=(KeyError("secret"),))) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="demo", messages=HI)
    assert caught.value.status_code == 500
    assert "secret" not in str(caught.value)
    assert "secret" in caplog.text


async def test_an_output_without_an_end_is_an_internal_error(caplog: pytest.LogCaptureFixture) -> None:
    async with openai_client(FakeBackend(script=())) as client:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="demo", messages=HI)
    assert "without a finish reason" in caplog.text


# --- everything else -------------------------------------------------------------------------------------------------


async def test_models_are_listed_and_found_even_with_a_slash_in_the_name() -> None:
    async with openai_client(FakeBackend()) as client:
        assert [model.id async for model in client.models.list()] == ["demo", "org/other"]
        assert (await client.models.retrieve("org/other")).owned_by == "paceline"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.models.retrieve("nope")


async def test_health_follows_the_backend() -> None:
    backend = FakeBackend()
    async with serving(backend) as address, httpx.AsyncClient(base_url=address) as client:
        assert (await client.get("/health")).status_code == 200
        backend.is_ready = False
        assert (await client.get("/health")).status_code == 503


async def test_ready_means_that_every_model_generates() -> None:
    backend = FakeBackend()
    async with serving(backend) as address, httpx.AsyncClient(base_url=address) as client:
        assert (await client.get("/ready")).status_code == 200
        assert [request.model for request in backend.requests] == ["demo", "org/other"]


async def test_a_model_that_generates_nothing_is_named_by_ready() -> None:
    backend = FakeBackend(script=[RequestError(ErrorKind.UNAVAILABLE, "no replica is ready")])
    async with serving(backend) as address, httpx.AsyncClient(base_url=address) as client:
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["reason"]) == (503, "demo: no replica is ready")


async def test_metrics_and_service_discovery_come_from_their_sources() -> None:
    options = ApiOptions(metrics=lambda: b"paceline_up 1\n", service_discovery=lambda: [{"targets": ["host:1"]}])
    transport = httpx.ASGITransport(create_app(FakeBackend, options))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        metrics = await client.get("/metrics")
        assert metrics.content == b"paceline_up 1\n"
        assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert (await client.get("/sd/prometheus")).json() == [{"targets": ["host:1"]}]


async def test_an_exception_before_generation_is_an_error_object_too() -> None:
    def broken() -> FakeBackend:
        raise KeyError("secret")

    transport = httpx.ASGITransport(create_app(broken), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.get("/v1/models")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
