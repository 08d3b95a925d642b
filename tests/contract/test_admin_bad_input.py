"""Whatever is sent to the admin API is answered with a 4xx that says why, and costs nothing without the token."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cluster.transport.admin_api import create_admin_app
from cluster.transport.admin_door import MAX_BODY_BYTES
from cluster.transport.admin_token import AdminToken
from cluster.transport.control_client import ControlClient
from tests.control_server import TOKEN, control_server

pytestmark = pytest.mark.contract

NO_TEXT = "\ud800"
HOSTILE: dict[str, tuple[object, ...]] = {
    "string": (NO_TEXT, "a" + NO_TEXT, "", "x" * 20_000, "\0", "\x1b[31m", 5, None, ["a"], {}),
    "integer": (-1, 0, 2**53, 2**64, 10**30, True, 1.5, "1", None, []),
    "number": (float("nan"), float("inf"), -1, 1e300, 10**30, "5", True, []),
    "boolean": ("yes", "true", 1, 0, None, []),
}
GOOD = {"text": "schema: paceline.policy/v1\n", "author": "ann", "enabled": True, "version": 1, "kind": "policy",
        "rollout_id": "none", "command": "abort"}  # fmt: skip


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    async with control_server(tmp_path / "control.db") as server:
        client = ControlClient(server.address, TOKEN)
        app = create_admin_app(lambda: client, AdminToken(TOKEN))
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)  # a 500, as a client sees it
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with httpx2.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http:
            yield http
        await client.close()


def resolved(schema: dict[str, Any], described: dict[str, Any]) -> dict[str, Any]:
    """What a reference leads to."""
    if "$ref" in schema:
        found: dict[str, Any] = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return found
    return schema


def types_of(schema: dict[str, Any]) -> list[str]:
    return [item["type"] for item in schema.get("anyOf", [schema]) if item.get("type") in HOSTILE]


def bodies(operation: dict[str, Any], described: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """For each field of an operation's body, the body with each hostile value there."""
    if "requestBody" not in operation:
        return
    schema = resolved(operation["requestBody"]["content"]["application/json"]["schema"], described)
    good = {name: GOOD[name] for name in schema["required"]}
    for name, field in schema["properties"].items():
        for kind in types_of(field):
            for value in HOSTILE[kind]:
                yield good | {name: value}


def queries(operation: dict[str, Any]) -> Iterator[dict[str, str]]:
    """For each parameter of an operation's query, each hostile value."""
    for parameter in operation.get("parameters", []):
        if parameter["in"] == "query":
            for kind in types_of(parameter["schema"]):
                yield from ({parameter["name"]: str(value)} for value in HOSTILE[kind] if NO_TEXT not in str(value))


def paths(path: str, operation: dict[str, Any]) -> Iterator[str]:
    """The path with good parameters, and with each hostile one."""
    names = [item["name"] for item in operation.get("parameters", []) if item["in"] == "path"]
    good = {name: GOOD[name] for name in names}
    yield path.format(**good)
    for name in names:
        for value in (-1, 0, 2**64, 10**30, "%ff", "%ed%a0%80", "x" * 10_000, "%00", "a%2Fb", "."):
            yield path.format(**{**good, name: value})


def calls(described: dict[str, Any]) -> Iterator[tuple[str, str, str | None, dict[str, str]]]:
    """Every hostile call that the description of the API leads to."""
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            good, *others = paths(path, operation)
            for other in others:
                yield method, other, json.dumps(next(bodies(operation, described), {})), {}
            for body in bodies(operation, described):
                yield method, good, json.dumps(body), {}
            for query in queries(operation):
                yield method, good, None, query


async def test_no_value_in_any_field_that_is_described_is_the_servers_fault(admin: httpx2.AsyncClient) -> None:
    described = (await admin.get("/openapi.json")).json()
    hostile = list(calls(described))
    assert len(hostile) > 200
    for method, path, body, query in hostile:
        headers = {} if body is None else {"content-type": "application/json"}
        answer = await admin.request(method, path, content=body, params=query, headers=headers)
        assert answer.status_code < 500, (method, path[:80], (body or "")[:200], query)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"], (method, path[:80])


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "word"),
    [
        ("POST", "/speculation", b"[", 400, "body: JSON decode error"),
        ("POST", "/speculation", b"[" * 100_000, 400, "body"),
        ("POST", "/speculation", b'{"enabled": true, "author": "a", "enabled": "yes"}', 400, "enabled"),
        ("POST", "/speculation", b"\xff", 400, "body"),
        ("POST", "/speculation", b"", 400, "body"),
        ("POST", "/speculation", b"{" + b" " * MAX_BODY_BYTES, 413, str(MAX_BODY_BYTES)),
        ("GET", "/no/such/thing", b"", 404, "Not Found"),
        ("DELETE", "/policy", b"", 405, "Method Not Allowed"),
    ],
)
async def test_what_is_no_call_is_answered_in_the_same_form(
    admin: httpx2.AsyncClient, method: str, path: str, content: bytes, status: int, word: str
) -> None:
    answer = await admin.request(method, path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/speculation", "/nothing", "/rollouts/openapi.json", "/rollouts/x/openapi.json"])
async def test_nothing_that_a_stranger_sends_is_read(admin: httpx2.AsyncClient, path: str) -> None:
    parts = iter([b"{"] * 3)

    async def endless() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    answer = await admin.post(path, content=endless(), headers={"authorization": "Bearer wrong"})
    assert (answer.status_code, len(list(parts))) == (401, 3)


@pytest.mark.parametrize("value", ["false", "no", 0, None])
async def test_a_switch_goes_neither_way_for_a_value_that_is_no_boolean(admin: httpx2.AsyncClient, value: Any) -> None:
    answer = await admin.post("/speculation", json={"enabled": value, "author": "ann"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "enabled")


async def test_what_is_not_found_is_no_model(admin: httpx2.AsyncClient) -> None:
    assert (await admin.get("/policy/versions/9")).json()["error"]["code"] == "not_found"


async def test_the_state_before_the_first_document_can_be_brought_back(admin: httpx2.AsyncClient) -> None:
    await admin.post("/speculation", json={"enabled": False, "author": "ann"})
    answer = await admin.post("/policy/rollback", json={"version": 0, "author": "ann"})
    assert (answer.json()["text"], answer.json()["info"]["version"]) == (GOOD["text"], 2)
