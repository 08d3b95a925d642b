"""Malformed requests, HTTP and gRPC: the status, code and field that each gets, and that the server serves on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from cluster.transport.openai_api import ApiOptions, create_app
from protos.paceline.v1 import inference_pb2 as pb
from tests.contract.grpc_server import inference_stub
from tests.fakes import FakeBackend

pytestmark = pytest.mark.contract

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
MAX_MODEL_LEN = 64
MAX_BODY_BYTES = 20_000
NAN = float("nan")


@dataclass(frozen=True)
class Bad:
    """A request that differs from a good one in `change`, and the answer it gets."""

    name: str
    change: dict[str, Any]
    param: str | None
    says: str
    code: str = "invalid_value"
    status: int = 400
    path: str = CHAT_PATH
    headers: dict[str, str] = field(default_factory=dict)


def user(content: object, role: str = "user", **more: object) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **more}]}


UNKNOWN, UNSUPPORTED, MISSING = "unknown_parameter", "unsupported_parameter", "missing_required_parameter"
TOO_LONG = "context_length_exceeded"


def schema(value: object, name: str | None = "answer") -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": value}}}


def regex(source: object) -> dict[str, Any]:
    return {"structured_outputs": {"regex": source}}


def nested(depth: int) -> dict[str, Any]:
    return {"properties": {"a": nested(depth - 1)}} if depth else {}


BOMB = {"allOf": [{"type": "string", "pattern": f".*a{i}.*"} for i in range(20)]}

BAD_FIELDS = [
    Bad("an unknown field", {"foo": 1}, "foo", "foo: Unrecognized request argument", UNKNOWN),
    Bad("no model", {"model": ...}, "model", "Missing required parameter", MISSING),
    Bad("a model that is not served", {"model": "gpt-4"}, "model", "served models: demo", "model_not_found", 404),
    Bad("a model that is no string", {"model": 7}, "model", "valid string"),
    Bad("no messages", {"messages": ...}, "messages", "Missing required parameter", MISSING),
    Bad("an empty conversation", {"messages": []}, "messages", "at least 1 item"),
    Bad("messages that are no list", {"messages": "hi"}, "messages", "valid array"),
    Bad("a message without a role", {"messages": [{"content": "a"}]}, "messages[0].role", "Missing", MISSING),
    Bad("an unknown role", user("a", role="king"), "messages[0].role", "'system', 'developer', 'user' or 'assistant'"),
    Bad("a tool's message", user("a", role="tool"), "messages[0].role", "'assistant'"),
    Bad("no content", user(None), "messages[0].content", "a string or a list of text parts"),
    Bad(
        "an image",
        user([{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages[0].content",
        "Only text parts",
        UNSUPPORTED,
    ),
    Bad("a text part without text", user([{"type": "text"}]), "messages[0].content", "a text that is a string"),
    Bad("tool calls", user("a", "assistant", tool_calls=[{"id": "1"}]), "messages[0].tool_calls", "Tools", UNSUPPORTED),
    Bad("a conversation the template refuses", user("a", "assistant"), "messages", "must start with the user"),
    Bad("a conversation that is too long", user("a" * 64), "messages", "64 tokens, but the prompt has", TOO_LONG),
    Bad("max_tokens of 0", {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    Bad("max_tokens that is a string", {"max_tokens": "5"}, "max_tokens", "valid integer"),
    Bad("max_tokens beyond the context", {"max_tokens": 64}, "messages", "64 output tokens were requested", TOO_LONG),
    Bad("max_tokens beyond any integer", {"max_tokens": 10**30}, "messages", "were requested", TOO_LONG),
    Bad("two different limits", {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "give one of them"),
    Bad("a negative temperature", {"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    Bad("a temperature above 2", {"temperature": 2.1}, "temperature", "less than or equal to 2"),
    Bad("a temperature that is no number", {"temperature": "hot"}, "temperature", "valid number"),
    Bad("a temperature that is NaN", {"temperature": float("nan")}, "temperature", "finite number"),
    Bad("an infinite temperature", {"temperature": float("inf")}, "temperature", "finite number"),
    Bad("a temperature that is a boolean", {"temperature": True}, "temperature", "valid number"),
    Bad("top_p of 0", {"top_p": 0}, "top_p", "greater than 0"),
    Bad("top_p above 1", {"top_p": 1.01}, "top_p", "less than or equal to 1"),
    Bad("top_k of 0", {"top_k": 0}, "top_k", "greater than or equal to 1"),
    Bad("top_k that is no integer", {"top_k": 1.5}, "top_k", "integer"),
    Bad("min_p above 1", {"min_p": 1.5}, "min_p", "less than or equal to 1"),
    Bad("a seed beyond 64 bits", {"seed": 2**64}, "seed", "less than 18446744073709551616"),
    Bad("an empty stop string", {"stop": ""}, "stop", "1 to 256 characters"),
    Bad("an endless stop string", {"stop": "a" * 257}, "stop", "1 to 256 characters"),
    Bad("too many stop strings", {"stop": [str(n) for n in range(17)]}, "stop", "At most 16 stop strings"),
    Bad("a stop string that is a number", {"stop": ["a", 1]}, "stop", "a string or a list of strings"),
    Bad("a negative stop token", {"stop_token_ids": [1, -1]}, "stop_token_ids[1]", "greater than or equal to 0"),
    Bad("too many stop tokens", {"stop_token_ids": list(range(65))}, "stop_token_ids", "at most 64 items"),
    Bad("no choice", {"n": 0}, "n", "greater than or equal to 1"),
    Bad("too many choices", {"n": 9}, "n", "less than or equal to 8"),
    Bad("a choice and a half", {"n": 1.5}, "n", "valid integer"),
    Bad("a presence penalty above 2", {"presence_penalty": 2.1}, "presence_penalty", "less than or equal to 2"),
    Bad("a presence penalty below -2", {"presence_penalty": -3}, "presence_penalty", "or equal to -2"),
    Bad("a frequency penalty above 2", {"frequency_penalty": 5}, "frequency_penalty", "less than or equal to 2"),
    Bad("a frequency penalty that is text", {"frequency_penalty": "1"}, "frequency_penalty", "valid number"),
    Bad("a repetition penalty of 0", {"repetition_penalty": 0}, "repetition_penalty", "or equal to 0.01"),
    Bad("a repetition penalty above 10", {"repetition_penalty": 11}, "repetition_penalty", "or equal to 10"),
    Bad("a repetition penalty that is NaN", {"repetition_penalty": NAN}, "repetition_penalty", "finite number"),
    Bad("a bias that is a list", {"logit_bias": [1]}, "logit_bias", "an object of biases"),
    Bad("a bias of text", {"logit_bias": {"one": 1}}, "logit_bias", "`one` is no token id"),
    Bad("a bias of a negative token", {"logit_bias": {"-1": 1}}, "logit_bias", "`-1` is no token id"),
    Bad("a bias of an endless token", {"logit_bias": {"9" * 5000: 1}}, "logit_bias", "is no token id"),
    Bad("a bias beyond the vocabulary", {"logit_bias": {"258": 1}}, "logit_bias", "between 0 and 257"),
    Bad("a bias above 100", {"logit_bias": {"1": 100.5}}, "logit_bias", "from -100 to 100"),
    Bad("a bias below -100", {"logit_bias": {"1": -101}}, "logit_bias", "from -100 to 100"),
    Bad("a bias that is no number", {"logit_bias": {"1": "5"}}, "logit_bias", "from -100 to 100"),
    Bad("a bias that is a boolean", {"logit_bias": {"1": True}}, "logit_bias", "from -100 to 100"),
    Bad("a bias that is NaN", {"logit_bias": {"1": NAN}}, "logit_bias", "from -100 to 100"),
    Bad("a token with two biases", {"logit_bias": {"1": 1, "01": 2}}, "logit_bias", "given twice"),
    Bad("too many biases", {"logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias", "At most 300 tokens"),
    Bad("negative min_tokens", {"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
    Bad("min_tokens above max_tokens", {"min_tokens": 9, "max_tokens": 8}, "min_tokens", "limit of 8"),
    Bad("min_tokens beyond the context", {"min_tokens": 64}, "min_tokens", "more than the output's limit"),
    Bad("tools", {"tools": [{"type": "function"}]}, "tools", "Tools are not supported", UNSUPPORTED),
    Bad(
        "nothing but stops in a form",
        regex("a") | {"min_tokens": 2, "stop_token_ids": [64]},
        "min_tokens",
        "not together with stop_token_ids",
    ),
    Bad("parallel tools", {"parallel_tool_calls": True}, "parallel_tool_calls", "not supported", UNSUPPORTED),
    Bad("an old function", {"functions": [{"name": "f"}]}, "functions", "not supported", UNSUPPORTED),
    Bad("a forced old function", {"function_call": {"name": "f"}}, "function_call", "not supported", UNSUPPORTED),
    Bad("a forced tool", {"tool_choice": "required"}, "tool_choice", "Tools are not supported", UNSUPPORTED),
    Bad("a form of no kind", {"response_format": {"type": "xml"}}, "response_format", "'json_object'"),
    Bad("a form that is text", {"response_format": "json"}, "response_format", "an object"),
    Bad("a form with more", {"response_format": {"type": "text", "a": 1}}, "response_format", "unknown key: a"),
    Bad("a form without a schema", {"response_format": {"type": "json_schema"}}, "response_format", "an object"),
    Bad("a schema that is text", schema("{}"), "response_format", "should be a schema"),
    Bad("a schema without a name", schema({}, name=None), "response_format", "json_schema.name"),
    Bad("a schema of an unknown type", schema({"type": "strin"}), "response_format", "Invalid type: strin"),
    Bad("a schema that is too hard", schema({"type": "array", "uniqueItems": True}), "response_format", "uniqueItems"),
    Bad("a schema of elsewhere", schema({"$ref": "http://127.0.0.1/s.json"}), "response_format", "127.0.0.1"),
    Bad(
        "a schema of nothing", schema({"type": "string", "minLength": 2, "maxLength": 1}), "response_format", "greater"
    ),
    Bad("a bottomless schema", schema(nested(70)), "response_format", "recursion limit"),
    Bad("a schema that is a bomb", schema(BOMB), "response_format", "too much time or memory"),
    Bad("a broken regex", regex("(a"), "structured_outputs", "unclosed group"),
    Bad("a regex that looks ahead", regex("(?=a)b"), "structured_outputs", "look-around"),
    Bad("a regex that nothing matches", regex("[^\\s\\S]"), "structured_outputs", "no output follows it"),
    Bad("a regex of nothing", regex("(a{0})"), "structured_outputs", "no output but an empty one"),
    Bad("a regex that is a number", regex(7), "structured_outputs", "1 to 65536 characters"),
    Bad("two forms", {"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one of"),
    Bad("no form", {"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    Bad("a form of nothing", {"structured_outputs": {"choice": []}}, "structured_outputs", "list of strings"),
    Bad("an unknown form", {"structured_outputs": {"a": 1}}, "structured_outputs", "unknown key: a"),
    Bad(
        "a grammar", {"structured_outputs": {"grammar": "s: /a/"}}, "structured_outputs", "grammar is not", UNSUPPORTED
    ),
    Bad("a form twice", regex("a") | {"response_format": {"type": "json_object"}}, "structured_outputs", "together"),
    Bad("no end of a form", regex("a") | {"ignore_eos": True}, "ignore_eos", "nothing can follow"),
    Bad("audio", {"modalities": ["text", "audio"]}, "modalities", "['text']", UNSUPPORTED),
    Bad("storage", {"store": True}, "store", "not stored", UNSUPPORTED),
    Bad("reasoning", {"reasoning_effort": "high"}, "reasoning_effort", "not supported", UNSUPPORTED),
    Bad("alternatives without logprobs", {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    Bad("too many alternatives", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    Bad("logprobs that are a number", {"logprobs": 3}, "logprobs", "valid boolean"),
    Bad("stream that is a string", {"stream": "yes"}, "stream", "valid boolean"),
    Bad("an unknown stream option", {"stream_options": {"a": 1}}, "stream_options.a", "Unrecognized", UNKNOWN),
    Bad("a deadline in the past", {"timeout_s": 0}, "timeout_s", "greater than 0"),
    Bad("speculation that is a boolean", {"speculation": True}, "speculation", "an object"),
    Bad(
        "too many draft tokens",
        {"speculation": {"max_draft_tokens": 33}},
        "speculation.max_draft_tokens",
        "less than or equal to 32",
    ),
    Bad(
        "an unknown drafter",
        {"speculation": {"drafter": "oracle"}},
        "speculation.drafter",
        "'auto', 'model', 'ngram' or 'none'",
    ),
    Bad("a tenant with a space", {}, "X-Paceline-Tenant", "1 to 64 letters", headers={"X-Paceline-Tenant": "a b"}),
    Bad("an endless tenant", {}, "X-Paceline-Tenant", "1 to 64 letters", headers={"X-Paceline-Tenant": "a" * 65}),
    Bad("an endless user", {}, "X-Paceline-User", "at most 256", headers={"X-Paceline-User": "a" * 257}),
    Bad("an endless session", {}, "X-Paceline-Session", "at most 256", headers={"X-Paceline-Session": "a" * 257}),
    Bad("a user with a tab", {}, "X-Paceline-User", "printable ASCII", headers={"X-Paceline-User": "a\tb"}),
    Bad("an endless user in the body", {"user": "a" * 257}, "user", "at most 256"),
    Bad("a user that is a number", {"user": 5}, "user", "string"),
    Bad("an empty workload", {}, "X-Paceline-Workload", "1 to 64 letters", headers={"X-Paceline-Workload": ""}),
    Bad("no prompt", {"prompt": ...}, "prompt", "Missing", MISSING, path=COMPLETIONS_PATH),
    Bad("an empty prompt", {"prompt": ""}, "prompt", "at least one token", path=COMPLETIONS_PATH),
    Bad("an empty list of prompts", {"prompt": []}, "prompt", "a list of token ids", path=COMPLETIONS_PATH),
    Bad("a prompt that is null", {"prompt": None}, "prompt", "a string", path=COMPLETIONS_PATH),
    Bad("prompts of mixed kinds", {"prompt": ["a", 1]}, "prompt", "Each prompt should be", path=COMPLETIONS_PATH),
    Bad("an empty list of token ids", {"prompt": [[1], []]}, "prompt", "Each prompt", path=COMPLETIONS_PATH),
    Bad("token ids that are booleans", {"prompt": [True]}, "prompt", "Each prompt", path=COMPLETIONS_PATH),
    Bad("a token id beyond the vocabulary", {"prompt": [1, 258]}, "prompt", "0 and 257", path=COMPLETIONS_PATH),
    Bad("a negative token id", {"prompt": [[1], [-1]]}, "prompt[1]", "between 0 and 257", path=COMPLETIONS_PATH),
    Bad("too many prompts", {"prompt": ["a"] * 65}, "prompt", "At most 64 prompts", path=COMPLETIONS_PATH),
    Bad(
        "one prompt too long",
        {"prompt": ["a", "b" * 64]},
        "prompt[1]",
        "has 64 tokens",
        TOO_LONG,
        path=COMPLETIONS_PATH,
    ),
    Bad("echo that is a number", {"echo": 1}, "echo", "valid boolean", path=COMPLETIONS_PATH),
    Bad(
        "log-probabilities of an echo",
        {"echo": True, "logprobs": 0},
        "echo",
        "leave out echo or logprobs",
        UNSUPPORTED,
        path=COMPLETIONS_PATH,
    ),
    Bad("echo in a chat", {"echo": True}, "echo", "Unrecognized", UNKNOWN),
    Bad("too many choices in all", {"prompt": ["a"] * 9, "n": 8}, "n", "At most 64 choices", path=COMPLETIONS_PATH),
    Bad("a suffix", {"suffix": "end"}, "suffix", "not supported", UNSUPPORTED, path=COMPLETIONS_PATH),
    Bad("the best of several", {"best_of": 2}, "best_of", "only the value of n", UNSUPPORTED, path=COMPLETIONS_PATH),
    Bad("logprobs beyond the limit", {"logprobs": 21}, "logprobs", "or equal to 20", path=COMPLETIONS_PATH),
    Bad("messages for completions", user("hi"), "messages", "Unrecognized", UNKNOWN, path=COMPLETIONS_PATH),
]

GOOD = {
    CHAT_PATH: {"model": "demo", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS_PATH: {"model": "demo", "prompt": "hi"},
}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(max_len=MAX_MODEL_LEN)


@pytest.fixture
async def http(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(lambda: backend, ApiOptions(max_body_bytes=MAX_BODY_BYTES)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.mark.parametrize("bad", BAD_FIELDS, ids=lambda bad: bad.name)
async def test_a_bad_http_request_is_refused_by_the_name_of_its_field(
    bad: Bad, backend: FakeBackend, http: httpx.AsyncClient
) -> None:
    body = {key: value for key, value in (GOOD[bad.path] | bad.change).items() if value is not ...}
    answer = await http.post(bad.path, content=json.dumps(body), headers=bad.headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (bad.status, bad.param, bad.code), error
    assert bad.says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert backend.requests == []
    assert (await http.post(bad.path, json=GOOD[bad.path])).status_code == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "EOF"),
        (b"{", "EOF"),
        (b"[]", "Input should be an object"),
        (b"null", "Input should be an object"),
        (b'{"model": "demo", "model": "\xff"}', "Invalid JSON"),
        (b'{"model": "\\ud800"}', "Invalid JSON"),
        (b"[" * 1000, "recursion limit"),
    ],
)
async def test_a_body_that_is_no_json_object_is_refused(http: httpx.AsyncClient, body: bytes, says: str) -> None:
    answer = await http.post(CHAT_PATH, content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, None)
    assert says in error["message"]


@pytest.mark.parametrize("path", GOOD)
async def test_a_body_over_the_limit_is_refused_unread(http: httpx.AsyncClient, path: str) -> None:
    async def parts() -> AsyncIterator[bytes]:
        """A body of unknown length, of which no more than the limit may be taken."""
        for _ in range(MAX_BODY_BYTES // 1000 + 1):
            yield b" " * 1000
        pytest.fail("read beyond the limit")

    for content in (parts(), b" " * (MAX_BODY_BYTES + 1)):
        answer = await http.post(path, content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert str(MAX_BODY_BYTES) in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/models/nothing", 404, "model_not_found"),
        ("GET", CHAT_PATH, 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/metrics", 404, "not_found"),
    ],
)
async def test_a_wrong_route_gets_an_error_object_too(
    http: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    answer = await http.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


# --- gRPC ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BadCall:
    """A call that differs from a good one in `change`, and the status it gets."""

    name: str
    change: dict[str, Any]
    says: str
    code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT
    metadata: tuple[tuple[str, str], ...] = ()


def turn(role: str, content: str = "hi") -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=content)])


BAD_CALLS = [
    BadCall("no model", {"model": ""}, "model: Missing required parameter"),
    BadCall("a model that is not served", {"model": "gpt-4"}, "served models: demo", grpc.StatusCode.NOT_FOUND),
    BadCall("no prompt", {"text": None}, "prompt: Missing required parameter; set text, chat or token_ids"),
    BadCall("an empty text", {"text": ""}, "text: the prompt should have at least one token"),
    BadCall("an empty conversation", {"chat": pb.ChatMessages()}, "chat.messages: Missing required parameter"),
    BadCall("a turn without a role", {"chat": turn("")}, "chat.messages[0].role: Missing required parameter"),
    BadCall("an unknown role", {"chat": turn("king")}, "chat.messages[0].role: Input should be 'system'"),
    BadCall("a conversation the template refuses", {"chat": turn("assistant")}, "chat: the model's chat template"),
    BadCall("no token ids", {"token_ids": pb.TokenIds()}, "token_ids.ids: Missing required parameter"),
    BadCall("a token id beyond the vocabulary", {"token_ids": pb.TokenIds(ids=[258])}, "token_ids: token ids should"),
    BadCall("a prompt that is too long", {"text": "a" * 65}, "64 tokens, but the prompt has 65 tokens"),
    BadCall("max_tokens of 0", {"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
    BadCall("max_tokens beyond the context", {"max_tokens": 64}, "but the prompt has 2 tokens and 64 output tokens"),
    BadCall("a negative temperature", {"temperature": -1.0}, "temperature: Input should be greater"),
    BadCall("a temperature that is NaN", {"temperature": float("nan")}, "temperature: Input should be a finite"),
    BadCall("top_p of 0", {"top_p": 0.0}, "top_p: Input should be greater than 0"),
    BadCall("top_k of 0", {"top_k": 0}, "top_k: Input should be greater than or equal to 1"),
    BadCall("too many stop strings", {"stop": [str(n) for n in range(17)]}, "stop: At most 16 stop strings"),
    BadCall("an empty stop string", {"stop": [""]}, "stop: Stop strings should have 1 to 256"),
    BadCall("a presence penalty above 2", {"presence_penalty": 2.5}, "presence_penalty: Input should be less than"),
    BadCall("a frequency penalty that is NaN", {"frequency_penalty": NAN}, "frequency_penalty: Input should be"),
    BadCall("a repetition penalty of 0", {"repetition_penalty": 0.0}, "repetition_penalty: Input should be greater"),
    BadCall("a bias above 100", {"logit_bias": {1: 101.0}}, "logit_bias: A bias should be a number from -100 to 100"),
    BadCall("a bias of a token beyond any", {"logit_bias": {2**31: 1.0}}, "logit_bias: `2147483648` is no token id"),
    BadCall("a bias beyond the vocabulary", {"logit_bias": {300: 1.0}}, "logit_bias: token ids should be between 0"),
    BadCall("min_tokens above max_tokens", {"min_tokens": 9, "max_tokens": 8}, "min_tokens: 9 tokens are more than"),
    BadCall("no choice", {"n": 0}, "n: Input should be greater than or equal to 1"),
    BadCall("too many choices", {"n": 9}, "n: Input should be less than or equal to 8"),
    BadCall("too many logprobs", {"logprobs": 21}, "logprobs: Input should be less than or equal to 20"),
    BadCall("a deadline in the past", {"timeout_s": 0.0}, "timeout_s: Input should be greater than 0"),
    BadCall(
        "an unknown drafter", {"speculation": pb.Speculation(drafter="oracle")}, "speculation.drafter: Input should be"
    ),
    BadCall("a tenant with a slash", {"tenant": "a/b"}, "tenant: should be 1 to 64 letters"),
    BadCall(
        "a workload with a space", {}, "X-Paceline-Workload: should be", metadata=(("x-paceline-workload", "a b"),)
    ),
]


@pytest.mark.parametrize("bad", BAD_CALLS, ids=lambda bad: bad.name)
async def test_a_bad_grpc_call_is_refused_by_the_name_of_its_field(bad: BadCall, backend: FakeBackend) -> None:
    async with inference_stub(backend) as stub:
        call = stub.Generate(_call(bad.change), metadata=bad.metadata)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is bad.code
        assert bad.says in (caught.value.details() or "")
        assert backend.requests == []
        good = [response async for response in stub.Generate(_call({}))]
        assert good[-1].usage.completion_tokens == 13


def _call(change: dict[str, Any]) -> pb.GenerateRequest:
    is_prompt = change.keys() & {"text", "chat", "token_ids"}
    return pb.GenerateRequest(**({"model": "demo"} | ({} if is_prompt else {"text": "hi"}) | change))


@pytest.mark.parametrize(
    ("request_pb", "code", "says"),
    [
        (pb.TokenizeRequest(text="a"), grpc.StatusCode.INVALID_ARGUMENT, "model: Missing"),
        (pb.TokenizeRequest(model="gpt-4", text="a"), grpc.StatusCode.NOT_FOUND, "does not exist"),
        (pb.TokenizeRequest(model="demo"), grpc.StatusCode.INVALID_ARGUMENT, "set text or chat"),
        (
            pb.TokenizeRequest(model="demo", chat=turn("king")),
            grpc.StatusCode.INVALID_ARGUMENT,
            "chat.messages[0].role",
        ),
    ],
)
async def test_a_bad_tokenize_call_is_refused(
    backend: FakeBackend, request_pb: pb.TokenizeRequest, code: grpc.StatusCode, says: str
) -> None:
    async with inference_stub(backend) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(request_pb)
    assert caught.value.code() is code
    assert says in (caught.value.details() or "")
