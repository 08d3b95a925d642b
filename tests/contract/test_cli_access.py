"""`paceline keys` and `paceline quota` against a real control service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from typer.testing import CliRunner, Result

from cluster.cli import access, app
from cluster.control.access import key_digest, parse_access
from cluster.control.quota import Quota
from cluster.control.store import Change, Kind
from cluster.transport.admin_api import PREFIX, create_admin_app
from cluster.transport.admin_token import AdminToken
from tests.contract.api_server import serving_app
from tests.control_server import ACCESS_TEXT, TOKEN, ControlServer, control_server

pytestmark = pytest.mark.contract


@dataclass(frozen=True)
class Operator:
    """Somebody with a terminal."""

    server: ControlServer
    url: str

    async def run(self, *arguments: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--url", self.url])

    async def document(self) -> Any:
        return parse_access((await self.server.service.get(Kind.ACCESS)).text)


@pytest.fixture
async def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Operator]:
    monkeypatch.setenv("PACELINE_ADMIN_TOKEN", TOKEN)
    async with control_server(tmp_path / "control.db") as server:
        root = FastAPI()
        root.mount(PREFIX, create_admin_app(lambda: server.service, AdminToken(TOKEN)))
        async with serving_app(root) as url:
            yield Operator(server, url)


async def test_a_key_is_made_listed_and_revoked(operator: Operator) -> None:
    key = (await operator.run("keys", "create", "phone", "acme")).output.split()[-1]
    (entry,) = (await operator.document()).keys
    assert (entry.label, entry.tenant, entry.sha256) == ("phone", "acme", key_digest(key))
    listed = (await operator.run("keys", "list")).output
    assert "phone" in listed
    assert key not in listed
    await operator.run("keys", "create", "desk", "acme")
    assert (await operator.run("keys", "revoke", "phone")).exit_code == 0
    assert [entry.label for entry in (await operator.document()).keys] == ["desk"]


async def test_the_last_key_is_not_taken_away_by_accident(operator: Operator) -> None:
    await operator.run("keys", "create", "phone", "acme")
    refused = await operator.run("keys", "revoke", "phone")
    assert (refused.exit_code, "the last key" in refused.stderr) == (1, True)
    assert len((await operator.document()).keys) == 1
    assert (await operator.run("keys", "revoke", "phone", "--last")).exit_code == 0
    assert (await operator.document()).keys == ()


async def test_a_quota_is_set_shown_and_taken_away_only_when_that_is_said(operator: Operator) -> None:
    await operator.run("quota", "--tenant", "acme", "--requests-per-minute", "7.5", "--max-concurrent", "3")
    await operator.run("quota", "--tokens-per-minute", "1000000")
    for arguments in ([], ["--tenant", "acme"]):
        shown = (await operator.run("quota", *arguments)).output
        assert "7.5" in shown
        assert ("1000000" in shown) == (not arguments)
    document = await operator.document()
    assert document.quotas.tenants["acme"].quota() == Quota(7.5, None, 3)
    assert (await operator.run("quota", "--tenant", "acme", "--unlimited")).exit_code == 0
    assert (await operator.document()).quotas.tenants["acme"].quota() == Quota()
    both = await operator.run("quota", "--unlimited", "--max-concurrent", "3")
    assert (both.exit_code, "--unlimited" in both.stderr) == (1, True)


async def test_a_change_that_somebody_else_was_faster_than_is_made_again(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, calls = asyncio.get_running_loop(), []
    call = access.call

    def slow(method: str, *arguments: Any, **options: Any) -> Any:
        calls.append(method)
        if calls == ["GET", "PUT"]:
            theirs = operator.server.service.apply(Kind.ACCESS, Change(ACCESS_TEXT, "bob", ""))
            asyncio.run_coroutine_threadsafe(theirs, loop).result(30)
        return call(method, *arguments, **options)

    monkeypatch.setattr(access, "call", slow)
    assert (await operator.run("keys", "create", "phone", "acme")).exit_code == 0
    assert calls == ["GET", "PUT", "GET", "PUT"]
    assert [entry.label for entry in (await operator.document()).keys] == ["phone"]


async def test_a_key_that_cannot_be_made_is_not_shown(operator: Operator) -> None:
    for arguments, word in ((("a b", "acme"), "keys[0].label"), (("phone", ""), "keys[0].tenant")):
        refused = await operator.run("keys", "create", *arguments)
        assert (refused.exit_code, word in refused.stderr, "pl-" in refused.output) == (1, True, False)
