"""API keys at both doors: whose they are, what they may ask for, and what is refused without them."""

from __future__ import annotations

import time

import grpc
import grpc.aio
import openai
import pytest

from cluster.control.access import AccessTable, key_digest, parse_access
from cluster.control.store import Kind, Snapshot, VersionInfo
from cluster.router.access import Access
from protos.paceline.v1 import inference_pb2
from tests.contract.api_server import openai_client
from tests.contract.grpc_server import inference_stub
from tests.fakes import FakeBackend

pytestmark = pytest.mark.contract

KEY = "pl-acme-secret"
DOCUMENT = f"""
schema: paceline.access/v1
keys:
  - {{label: mobile, tenant: acme, sha256: {key_digest(KEY)}}}
quotas:
  tenants: {{acme: {{requests_per_minute: 60, max_concurrent: 2}}}}
"""


def guarded() -> FakeBackend:
    backend = FakeBackend()
    backend.access.apply(Snapshot(VersionInfo(Kind.ACCESS, 1, "", "ann", "", 0.0, ""), DOCUMENT))
    return backend


async def ask(client: openai.AsyncOpenAI, **headers: str) -> None:
    await client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "hi"}], extra_headers=headers
    )


async def test_while_no_key_is_configured_any_will_do_and_the_header_names_the_tenant() -> None:
    backend = FakeBackend()
    async with openai_client(backend) as client:
        await ask(client, **{"X-Paceline-Tenant": "globex"})
    assert (backend.requests[0].tenant, backend.requests[0].key_label) == ("globex", None)


async def test_where_keys_are_required_nobody_comes_in_before_there_is_one() -> None:
    backend = FakeBackend(access=Access(1, time.monotonic, require_keys=True))
    async with openai_client(backend) as client:
        with pytest.raises(openai.AuthenticationError):
            await ask(client.with_options(api_key=KEY))
        async with inference_stub(backend) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stub.Tokenize(inference_pb2.TokenizeRequest(model="demo", text="hi"))
            assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED
        backend.access.apply(Snapshot(VersionInfo(Kind.ACCESS, 1, "", "ann", "", 0.0, ""), DOCUMENT))
        await ask(client.with_options(api_key=KEY))
    assert [request.tenant for request in backend.requests] == ["acme"]


async def test_a_key_says_whose_request_it_is() -> None:
    backend = guarded()
    async with openai_client(backend) as client:
        await ask(client.with_options(api_key=KEY))
        await ask(client.with_options(api_key=KEY), **{"X-Paceline-Tenant": "acme"})
    assert [(request.tenant, request.key_label) for request in backend.requests] == [("acme", "mobile")] * 2


@pytest.mark.parametrize("key", ["unused", "pl-acme-secret-", "", KEY.upper()])
async def test_a_wrong_key_is_a_401_before_anything_else(key: str) -> None:
    backend = guarded()
    async with openai_client(backend) as client:
        stranger = client.with_options(api_key="x")
        authorization = f"Bearer {key}"
        with pytest.raises(openai.AuthenticationError) as failure:
            await ask(stranger, Authorization=authorization)
        assert failure.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list(extra_headers={"Authorization": authorization})
    assert not backend.requests


async def test_more_outputs_than_the_quota_ever_allows_are_a_400_and_none_begins() -> None:
    backend = guarded()
    async with openai_client(backend) as client:
        with pytest.raises(openai.BadRequestError, match="3 outputs at once") as failure:
            await client.with_options(api_key=KEY).chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "hi"}], n=3
            )
        assert failure.value.param == "n"
    assert not backend.requests


async def test_another_tenants_name_is_a_403() -> None:
    backend = guarded()
    async with openai_client(backend) as client:
        with pytest.raises(openai.PermissionDeniedError, match="not one of tenant 'globex'"):
            await ask(client.with_options(api_key=KEY), **{"X-Paceline-Tenant": "globex"})
    assert not backend.requests


async def test_the_grpc_door_has_the_same_lock() -> None:
    backend = guarded()
    request = inference_pb2.GenerateRequest(model="demo", text="hi")
    async with inference_stub(backend) as stub:
        for metadata, code in (
            ((), grpc.StatusCode.UNAUTHENTICATED),
            ((("authorization", "Bearer wrong"),), grpc.StatusCode.UNAUTHENTICATED),
            ((("authorization", f"Bearer {KEY}"), ("x-paceline-tenant", "b")), grpc.StatusCode.PERMISSION_DENIED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                [response async for response in stub.Generate(request, metadata=metadata)]
            assert failure.value.code() is code
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stub.Tokenize(inference_pb2.TokenizeRequest(model="demo", text="hi"), metadata=metadata)
            assert failure.value.code() is code
        named = inference_pb2.GenerateRequest(model="demo", text="hi", tenant="b")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            [response async for response in stub.Generate(named, metadata=(("authorization", f"Bearer {KEY}"),))]
        assert failure.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert [r async for r in stub.Generate(request, metadata=(("authorization", f"bearer {KEY}"),))]
    assert [request.tenant for request in backend.requests] == ["acme"]


def test_the_document_holds_no_key() -> None:
    assert KEY not in DOCUMENT
    table = AccessTable(parse_access(DOCUMENT))
    assert table.key(KEY) is not None
    assert table.key(key_digest(KEY)) is None  # knowing the document does not open the door
