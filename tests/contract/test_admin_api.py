"""The admin API over HTTP, on a control service behind a real gRPC port: what a router passes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cluster.transport.admin_api import create_admin_app
from cluster.transport.admin_token import AdminToken, configured_token
from cluster.transport.control_client import ControlClient
from tests.control_server import TOKEN, control_server

pytestmark = pytest.mark.contract

CALLS = (("GET", "/policy"), ("PUT", "/policy"), ("GET", "/status"), ("POST", "/speculation"), ("GET", "/audit"))
TEXT = "schema: paceline.policy/v1\nsalt: one\n"


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    async with control_server(tmp_path / "control.db") as server:
        client = ControlClient(server.address, TOKEN)
        transport = httpx2.ASGITransport(create_admin_app(lambda: client, AdminToken(TOKEN)))
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with httpx2.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http:
            yield http
        await client.close()


def body(**fields: Any) -> dict[str, Any]:
    return {"author": "ann", "reason": "because", **fields}


async def test_a_document_goes_through_its_life(admin: httpx2.AsyncClient) -> None:
    applied = await admin.put("/policy", json=body(text=TEXT))
    assert applied.status_code == 200
    assert applied.json()["info"]["version"] == 1
    switched = await admin.post("/speculation", json=body(enabled=False, tenant="acme"))
    assert "acme" in switched.json()["text"]
    assert (await admin.get("/policy")).json() == switched.json()
    assert (await admin.get("/policy/versions/1")).json()["text"] == TEXT
    assert (await admin.post("/policy/rollback", json=body(version=1))).json()["info"]["restores"] == 1
    versions = (await admin.get("/policy/versions", params={"limit": 2})).json()
    assert [info["version"] for info in versions] == [3, 2]
    assert versions[0]["author"] == "ann"
    status = (await admin.get("/status")).json()
    assert (status["policy_version"], status["access_version"], status["routers"]) == (3, 0, [])


@pytest.mark.parametrize(
    ("method", "path", "json", "status", "word"),
    [
        ("GET", "/policy/versions/9", None, 404, "9"),
        ("GET", "/nothing", None, 400, "kind"),
        ("GET", "/policy/versions?limit=0", None, 400, "limit"),
        ("GET", "/policy/versions/x", None, 400, "version"),
        ("PUT", "/policy", {"text": "schema: x"}, 400, "author"),
        ("PUT", "/policy", body(text="schema: x"), 400, "schema"),
        ("PUT", "/policy", body(text=TEXT, extra=1), 400, "extra"),
        ("PUT", "/policy", body(text=TEXT + "#" * 300_000), 400, "bytes"),
        ("PUT", "/policy", body(text=TEXT, expected_version=4), 409, "not at 4"),
        ("PUT", "/policy", body(text=TEXT, author="a" * 200), 400, "author"),
        ("PUT", "/access", body(text="schema: paceline.access/v1\nkeys: [{label: l}]"), 400, "keys[0].tenant"),
        ("POST", "/speculation", body(enabled=True, percent=101), 400, "percent"),
        ("POST", "/speculation", body(enabled=False, percent=5), 400, "percent"),
        ("POST", "/policy/rollback", body(version=3), 404, "3"),
    ],
)
async def test_bad_input_names_the_field_and_changes_nothing(
    admin: httpx2.AsyncClient, method: str, path: str, json: Any, status: int, word: str
) -> None:
    answer = await admin.request(method, path, json=json)
    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]
    assert (await admin.get("/status")).json()["policy_version"] == 0


async def test_before_the_first_document_version_0_is_what_holds(admin: httpx2.AsyncClient) -> None:
    for kind in ("policy", "access"):
        answer = (await admin.get(f"/{kind}")).json()
        assert (answer["info"]["version"], answer["text"]) == (0, f"schema: paceline.{kind}/v1\n")
    await admin.put("/policy", json=body(text=TEXT))
    assert (await admin.get("/policy/versions/0")).json()["text"] == "schema: paceline.policy/v1\n"


async def test_every_change_is_in_the_audit_log_which_is_read_page_by_page(admin: httpx2.AsyncClient) -> None:
    await admin.put("/policy", json=body(text=WITH_RULE))
    await admin.put("/access", json=body(text="schema: paceline.access/v1\n", author="bob"))
    await admin.post("/speculation", json=body(enabled=False))
    await admin.post("/policy/rollback", json=body(version=1))
    await admin.put("/policy", json=body(text="schema: x"))  # refused: nothing has been done
    rollout = (await admin.post("/rollouts", json=body(text=ROLLOUT))).json()["rollout_id"]
    entries = (await admin.get("/audit")).json()
    assert [(e["actor"], e["action"], e["target"], e["outcome"], e["detail"]) for e in reversed(entries)] == [
        ("ann", "policy.apply", "policy", "version 1", "because"),
        ("bob", "access.apply", "access", "version 1", "because"),
        ("ann", "policy.switch", "policy", "version 2", "because"),
        ("ann", "policy.rollback", "policy", "version 3", "because"),
        ("ann", "rollout.start", rollout, "running", "because"),
        (f"rollout/{rollout}", "policy.percent", "policy", "version 4", "5 %: started"),
    ]
    assert entries[0]["at"] == 1_000.0
    page = (await admin.get("/audit", params={"limit": 2, "before": entries[0]["sequence"]})).json()
    assert page == entries[1:3]
    for query in ({"limit": 0}, {"limit": 101}, {"before": 0}):
        assert (await admin.get("/audit", params=query)).status_code == 400


ROLLOUT = """
schema: paceline.rollout/v1
target: {rule: fast}
steps: [{set_percent: 5}, {analyse: {window_s: 300}}, {set_percent: 100}]
conditions: [{metric: ttft, at_most: 1.2}]
"""
WITH_RULE = TEXT + "rules: [{id: fast, action: allow, percent: 0}]\n"


async def test_a_rollout_is_started_looked_at_and_taken_back(admin: httpx2.AsyncClient) -> None:
    await admin.put("/policy", json=body(text=WITH_RULE))
    started = (await admin.post("/rollouts", json=body(text=ROLLOUT))).json()
    assert (started["phase"], started["rule"], started["percent"], started["author"]) == ("running", "fast", 5.0, "ann")
    assert "percent: 5.0" in (await admin.get("/policy")).json()["text"]
    path = f"/rollouts/{started['rollout_id']}"
    again = await admin.post("/rollouts", json=body(text=ROLLOUT))
    assert (again.status_code, started["rollout_id"] in again.text) == (409, True)
    for command, phase in (("pause", "paused"), ("resume", "running"), ("abort", "aborted")):
        assert (await admin.post(f"{path}/{command}", json=body())).json()["phase"] == phase
    assert (await admin.post(f"{path}/promote", json=body())).status_code == 409
    ended = (await admin.get(path)).json()
    assert (ended["percent"], ended["is_pending"], ended["why"]) == (0.0, False, "aborted by ann: because")
    assert (await admin.get("/rollouts")).json() == [ended]
    assert "percent: 0.0" in (await admin.get("/policy")).json()["text"]


@pytest.mark.parametrize(
    ("method", "path", "json", "status", "word"),
    [
        ("GET", "/rollouts/none", None, 404, "none"),
        ("GET", "/rollouts?limit=0", None, 400, "limit"),
        ("POST", "/rollouts/none/abort", body(), 404, "none"),
        ("POST", "/rollouts/none/explode", body(), 400, "command"),
        ("POST", "/rollouts/none/abort", {}, 400, "author"),
        ("POST", "/rollouts", body(), 400, "text"),
        ("POST", "/rollouts", body(text=ROLLOUT, author="a" * 200), 400, "author"),
        ("POST", "/rollouts", body(text=ROLLOUT, reason="r" * 2000), 400, "reason"),
        ("POST", "/rollouts", body(text=ROLLOUT), 400, "target.rule"),
        ("POST", "/rollouts", body(text=ROLLOUT.replace("300", "-1")), 400, "steps[1].analyse.window_s"),
    ],
)
async def test_a_bad_rollout_is_refused_by_field(
    admin: httpx2.AsyncClient, method: str, path: str, json: Any, status: int, word: str
) -> None:
    answer = await admin.request(method, path, json=json)
    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]
    assert (await admin.get("/rollouts")).json() == []


def test_the_token_of_an_environment_may_have_a_line_end_and_must_fit_into_a_header() -> None:
    assert configured_token({"PACELINE_ADMIN_TOKEN": "secret\n"}) == "secret"
    assert configured_token({"PACELINE_ADMIN_TOKEN": " \n"}) is None is configured_token({})
    for token in ("a\nb", "schlüssel", "a\x7f"):
        with pytest.raises(ValueError, match="PACELINE_ADMIN_TOKEN should have printable ASCII"):
            configured_token({"PACELINE_ADMIN_TOKEN": token})


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", f"Basic {TOKEN}", TOKEN])
async def test_nothing_is_said_without_the_token(admin: httpx2.AsyncClient, authorization: str | None) -> None:
    del admin.headers["authorization"]
    headers = {} if authorization is None else {"authorization": authorization}
    for method, path in (*CALLS, ("GET", "/rollouts"), ("POST", "/rollouts"), ("POST", "/rollouts/x/abort")):
        answer = await admin.request(method, path, json=body(text=TEXT, enabled=True), headers=headers)
        assert answer.status_code == 401


async def test_the_api_is_described(admin: httpx2.AsyncClient) -> None:
    described = (await admin.get("/openapi.json")).json()
    assert set(described["paths"]) == {
        "/status",
        "/speculation",
        "/rollouts",
        "/rollouts/{rollout_id}",
        "/rollouts/{rollout_id}/{command}",
        "/{kind}",
        "/{kind}/versions",
        "/{kind}/versions/{version}",
        "/{kind}/rollback",
        "/report",
        "/audit",
    }
    assert described["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
