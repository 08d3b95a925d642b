"""The running cluster through gRPC."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.paceline.v1 import common_pb2
from protos.paceline.v1 import inference_pb2 as pb
from tests.e2e.cluster import MODEL, Cluster, wait_until

pytestmark = pytest.mark.e2e


def question(**fields: Any) -> pb.GenerateRequest:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="What is calculus?")])
    return pb.GenerateRequest(**{"model": MODEL, "chat": chat, "max_tokens": 32, "temperature": 0.0, **fields})


async def test_generate_streams_and_counts_what_it_streamed(stub: Any) -> None:
    responses = [response async for response in stub.Generate(question())]
    usage = responses[-1].usage
    assert sum(len(response.token_ids) for response in responses) == usage.completion_tokens == 32
    assert responses[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert "".join(response.text for response in responses).startswith("Calculus")
    assert usage.acceptance_length == pytest.approx(usage.completion_tokens / usage.num_steps)


async def test_a_call_says_which_policy_it_followed(stub: Any, cluster: Cluster) -> None:
    call = stub.Generate(question(max_tokens=2, user="alice"))
    responses = [response async for response in call]
    metadata = dict(await call.trailing_metadata())
    version = cluster.status()["policy_version"]
    assert responses[-1].usage.policy == pb.PolicyDecision(version=version, variant="default", reason="default")
    assert (metadata["x-paceline-variant"], metadata["x-paceline-policy-version"]) == ("default", str(version))


async def test_speculation_changes_no_token(stub: Any) -> None:
    async def tokens(enabled: bool) -> list[int]:
        request = question(temperature=0.9, seed=3, speculation=pb.Speculation(enabled=enabled))
        return [token async for response in stub.Generate(request) for token in response.token_ids]

    assert await tokens(True) == await tokens(False)


async def test_cancelling_a_call_frees_both_pools(stub: Any, cluster: Cluster) -> None:
    call = stub.Generate(question(max_tokens=1500, ignore_eos=True))
    await call.read()
    assert not cluster.is_idle()
    call.cancel()
    wait_until(cluster.is_idle, 2.0, "freeing a cancelled call's blocks in both pools")


async def test_tokenize_agrees_with_the_prompt_that_generate_counts(stub: Any) -> None:
    request = question(max_tokens=1)
    tokens = await stub.Tokenize(pb.TokenizeRequest(model=MODEL, chat=request.chat))
    responses = [response async for response in stub.Generate(request)]
    assert len(tokens.token_ids) == responses[-1].usage.prompt_tokens


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"model": "nobody"}, grpc.StatusCode.NOT_FOUND, "nobody"),
        ({"temperature": -1.0}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        ({"top_p": 0.0}, grpc.StatusCode.INVALID_ARGUMENT, "top_p"),
        ({"max_tokens": 5000}, grpc.StatusCode.INVALID_ARGUMENT, "2048"),
        ({"timeout_s": 0.000001}, grpc.StatusCode.DEADLINE_EXCEEDED, "deadline"),
    ],
)
async def test_errors_have_their_status(stub: Any, fields: dict[str, Any], code: grpc.StatusCode, words: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        [response async for response in stub.Generate(question(**fields))]
    assert failed.value.code() is code
    assert words in (failed.value.details() or "")


async def test_health_and_reflection_answer(cluster: Cluster) -> None:
    async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection.ServerReflectionInfo()
        await call.write(request)
        answer = await call.read()
        await call.done_writing()
        names = {service.name for service in answer.list_services_response.service}
    assert {"paceline.v1.InferenceService", "grpc.health.v1.Health"} <= names
