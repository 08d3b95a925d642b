"""The gRPC API as a grpc.aio client sees it, and the servicer as plain functions."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from cluster.messages.answer import ErrorKind, FinishReason, PolicyStamp, RequestError
from cluster.messages.request import Drafter, Grammar, GrammarKind, SpeculationOverride
from cluster.transport.grpc_errors import grpc_status
from cluster.transport.inference_servicer import InferenceServicer
from protos.paceline.v1 import common_pb2
from protos.paceline.v1 import inference_pb2 as pb
from tests.contract.grpc_server import inference_stub
from tests.fakes import FakeBackend, byte_tokenizer

pytestmark = pytest.mark.contract

CHAT = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])


async def generate(backend: FakeBackend, request: pb.GenerateRequest, **metadata: str) -> list[pb.GenerateResponse]:
    servicer = InferenceServicer(lambda: backend)
    return [response async for response in servicer.generate(request, metadata)]


async def test_output_is_streamed_and_the_last_message_has_the_usage() -> None:
    async with inference_stub(FakeBackend()) as stub:
        responses = [item async for item in stub.Generate(pb.GenerateRequest(model="demo", chat=CHAT))]
    assert [response.text for response in responses] == ["Hello", ", world", "!"]
    assert [len(response.token_ids) for response in responses] == [5, 7, 1]
    assert [response.finish_reason for response in responses] == [0, 0, common_pb2.FINISH_REASON_STOP]
    assert len({response.request_id for response in responses}) == 1
    usage = responses[-1].usage
    assert usage.prompt_tokens == len(byte_tokenizer().apply_chat_template([{"role": "user", "content": "hi"}]))
    assert (usage.completion_tokens, usage.num_steps, usage.num_draft_tokens) == (13, 1, 4)
    assert not responses[0].HasField("usage")


async def test_every_field_reaches_the_backend() -> None:
    backend = FakeBackend()
    request = pb.GenerateRequest(
        model="demo",
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        max_tokens=9,
        temperature=0,
        top_p=0.5,
        top_k=4,
        min_p=0.25,
        seed=2**64 - 1,
        stop=["END"],
        stop_token_ids=[7],
        ignore_eos=True,
        logprobs=2,
        tenant="team-a",
        timeout_s=1.5,
        speculation=pb.Speculation(enabled=False, max_draft_tokens=2, drafter="model"),
    )
    await generate(backend, request, **{"x-paceline-tenant": "other", "x-paceline-workload": "batch"})
    [seen] = backend.requests
    sampling = seen.sampling
    assert seen.prompt_token_ids == (1, 2, 3)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.0, 0.5, 4)
    assert (sampling.min_p, sampling.seed, sampling.stop) == (0.25, 2**64 - 1, ("END",))
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.num_logprobs) == ((7,), True, 2)
    assert (seen.tenant, seen.workload, seen.deadline_s) == ("team-a", "batch", 1.5)
    assert seen.speculation == SpeculationOverride(False, 2, Drafter.MODEL)


async def test_user_and_session_come_from_the_message_or_else_the_metadata() -> None:
    backend = FakeBackend()
    metadata = {"x-paceline-user": "alice", "x-paceline-session": "s-1"}
    await generate(backend, pb.GenerateRequest(model="demo", text="ab"), **metadata)
    await generate(backend, pb.GenerateRequest(model="demo", text="ab", user="bob", session="s-2"), **metadata)
    assert [(seen.user, seen.session) for seen in backend.requests] == [("alice", "s-1"), ("bob", "s-2")]
    for name in ("user", "session"):
        with pytest.raises(RequestError, match=f"{name}: should have at most 256"):
            await generate(backend, pb.GenerateRequest(model="demo", text="ab", **{name: "a" * 257}))


async def test_the_policy_decision_is_in_the_usage_and_in_the_trailing_metadata() -> None:
    backend = FakeBackend(policy=PolicyStamp(7, "canary", "rule", "acme"))
    async with inference_stub(backend) as stub:
        call = stub.Generate(pb.GenerateRequest(model="demo", text="ab", n=2))
        responses = [response async for response in call]
        metadata = dict(await call.trailing_metadata())
    decisions = [response.usage.policy for response in responses if response.HasField("usage")]
    assert decisions == [pb.PolicyDecision(version=7, variant="canary", reason="rule", rule="acme")] * 2
    assert (metadata["x-paceline-variant"], metadata["x-paceline-policy-version"]) == ("canary", "7")


async def test_a_grammar_reaches_the_backend_if_it_is_any_good() -> None:
    backend = FakeBackend()
    kinds = {
        common_pb2.GRAMMAR_KIND_REGEX: (GrammarKind.REGEX, "[ab]+"),
        common_pb2.GRAMMAR_KIND_JSON_SCHEMA: (GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
    }
    for number, (kind, source) in kinds.items():
        grammar = common_pb2.Grammar(kind=number, source=source)
        await generate(backend, pb.GenerateRequest(model="demo", text="a", grammar=grammar))
        assert backend.requests[-1].sampling.grammar == Grammar(kind, source)
    for grammar in (
        common_pb2.Grammar(source="a"),
        common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_REGEX),
        common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_REGEX, source="("),
        common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_JSON_SCHEMA, source="{"),
    ):
        with pytest.raises(RequestError, match="grammar: ") as refused:
            await generate(backend, pb.GenerateRequest(model="demo", text="a", grammar=grammar))
        assert refused.value.kind is ErrorKind.INVALID
    assert len(backend.requests) == 2


async def test_what_a_call_leaves_out_has_defaults() -> None:
    backend = FakeBackend()
    await generate(backend, pb.GenerateRequest(model="demo", text="ab"))
    sampling = backend.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (backend.max_len - 2, 1.0, 1.0)
    assert (sampling.top_k, sampling.stop, sampling.num_logprobs) == (None, (), None)
    assert backend.requests[0].tenant == "default"


async def test_logprobs_come_with_their_tokens() -> None:
    request = pb.GenerateRequest(model="demo", text="x", logprobs=2)
    [response] = await generate(FakeBackend(script=("ab",)), request)
    assert [item.token_id for item in response.logprobs] == list(response.token_ids)
    assert [round(top.logprob, 3) for top in response.logprobs[0].top] == [-0.5, -1.5]


async def test_a_length_limit_is_a_finish_reason() -> None:
    responses = await generate(
        FakeBackend(finish_reason=FinishReason.LENGTH), pb.GenerateRequest(model="demo", text="x")
    )
    assert responses[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_a_text_and_a_conversation_are_tokenised() -> None:
    async with inference_stub(FakeBackend()) as stub:
        text = await stub.Tokenize(pb.TokenizeRequest(model="demo", text="héllo"))
        chat = await stub.Tokenize(pb.TokenizeRequest(model="demo", chat=CHAT))
    assert tuple(text.token_ids) == byte_tokenizer().encode("héllo")
    assert tuple(chat.token_ids) == byte_tokenizer().apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("script", [(None,), ("Hello", None)])
async def test_a_cancelled_call_cancels_the_request(script: tuple[str | None, ...]) -> None:
    backend = FakeBackend(script=script)
    async with inference_stub(backend) as stub, asyncio.timeout(5):
        call = stub.Generate(pb.GenerateRequest(model="demo", text="x"))
        reading = [await call.read() for entry in script if entry is not None]
        assert [response.text for response in reading] == [entry for entry in script if entry is not None]
        await backend.waiting.wait()
        call.cancel()
        await backend.closed.get()


async def test_a_client_whose_own_deadline_passes_cancels_the_request() -> None:
    backend = FakeBackend(script=(None,))
    async with inference_stub(backend) as stub, asyncio.timeout(5):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(model="demo", text="x"), timeout=0.2).read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if backend.requests:  # on a busy machine the deadline may pass before the call reaches the server
            await backend.closed.get()


async def test_closing_the_generator_cancels_the_request() -> None:
    backend = FakeBackend(script=("Hello", None))
    responses = InferenceServicer(lambda: backend).generate(pb.GenerateRequest(model="demo", text="x"), {})
    assert (await anext(responses)).text == "Hello"
    await responses.aclose()
    assert backend.closed.qsize() == 1


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (ErrorKind.INVALID, grpc.StatusCode.INVALID_ARGUMENT),
        (ErrorKind.CONTEXT_LENGTH, grpc.StatusCode.INVALID_ARGUMENT),
        (ErrorKind.NOT_FOUND, grpc.StatusCode.NOT_FOUND),
        (ErrorKind.OVERLOADED, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (ErrorKind.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
        (ErrorKind.DEADLINE, grpc.StatusCode.DEADLINE_EXCEEDED),
        (ErrorKind.INTERNAL, grpc.StatusCode.INTERNAL),
    ],
)
def test_every_kind_of_error_has_a_status(kind: ErrorKind, code: grpc.StatusCode) -> None:
    assert (grpc_status(RequestError(kind, "why")).code, grpc_status(RequestError(kind, "why")).details) == (
        code,
        "why",
    )


async def test_overload_says_when_to_come_back() -> None:
    backend = FakeBackend(script=(RequestError(ErrorKind.OVERLOADED, "busy", retry_after_s=2.2),))
    async with inference_stub(backend) as stub:
        call = stub.Generate(pb.GenerateRequest(model="demo", text="x"))
        with pytest.raises(grpc.aio.AioRpcError, match="busy"):
            await call.read()
        assert ("retry-after", "3") in list(await call.trailing_metadata())


async def test_a_failure_after_some_output_ends_the_stream_with_its_status() -> None:
    backend = FakeBackend(script=("Hel", "lo"), finish_reason=FinishReason.DEADLINE)
    async with inference_stub(backend) as stub:
        call = stub.Generate(pb.GenerateRequest(model="demo", text="x"))
        assert [(await call.read()).text for _ in range(2)] == ["Hel", "lo"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_an_unexpected_exception_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    async with inference_stub(FakeBackend(script=(KeyError("secret"),))) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(model="demo", text="x")).read()
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value)
    assert "secret" in caplog.text
