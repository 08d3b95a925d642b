"""Whatever JSON arrives, the answer is a success or names what is wrong: never a server error."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.transport.inference_servicer import GenerateFields
from cluster.transport.openai_api import create_app
from cluster.transport.openai_schema import ChatCompletionRequest, CompletionRequest
from tests.fakes import FakeBackend

pytestmark = pytest.mark.property

FIELDS = sorted(
    ChatCompletionRequest.model_fields.keys()
    | CompletionRequest.model_fields.keys()
    | GenerateFields.model_fields.keys()
)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
names = st.sampled_from([*FIELDS, "role", "content", "type", "text", "enabled", "drafter", "include_usage"])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
GOOD: list[tuple[str, dict[str, object]]] = [
    ("/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"model": "demo", "prompt": "hi"}),
]


async def post(path: str, body: object) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(FakeBackend))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, content=json.dumps(body))


@given(good=st.sampled_from(GOOD), change=st.dictionaries(names, values, min_size=1, max_size=3))
def test_a_changed_request_is_served_or_refused_by_name(
    good: tuple[str, dict[str, object]], change: dict[str, object]
) -> None:
    path, body = good
    answer = asyncio.run(post(path, body | change))
    if answer.status_code != 200:
        assert answer.status_code in (400, 404)
        error = answer.json()["error"]
        assert error["message"]
        assert error["code"]
        assert error["param"] is not None


@given(path=st.sampled_from([path for path, _ in GOOD]), body=values)
def test_any_json_at_all_is_refused(path: str, body: object) -> None:
    answer = asyncio.run(post(path, body))
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
