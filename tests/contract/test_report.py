"""The report over gRPC and HTTP, on a control service behind a real port, and what `paceline report` makes of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2
import pytest
import typer.testing

import cluster.cli.report
from cluster.cli import app
from cluster.control.breakdown import Window
from cluster.control.dimensions import Dimension
from cluster.control.report import Report
from cluster.control.report_query import ReportQuery
from cluster.messages.answer import ErrorKind, RequestError
from cluster.transport.admin_api import create_admin_app
from cluster.transport.admin_token import AdminToken
from cluster.transport.control_client import ControlClient
from tests.control_server import TOKEN, ControlServer, control_server
from tests.finished import finished, guessed

pytestmark = pytest.mark.contract

QUERY = ReportQuery(Window.MINUTE, (Dimension.TENANT, Dimension.VARIANT))
REQUESTS = (
    *(finished(i, variant="control", tpot_s=0.01) for i in range(6)),
    *(finished(i, variant="canary", tpot_s=0.02, guesses=guessed(1.5, 40)) for i in range(6)),
    finished(tenant="[bold]mallory"),
)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ControlServer]:
    async with control_server(tmp_path / "control.db") as running:
        running.service.take_records(REQUESTS)
        yield running


async def over_http(server: ControlServer, query: str, token: str = TOKEN) -> httpx2.Response:
    client = ControlClient(server.address, TOKEN)
    transport = httpx2.ASGITransport(create_admin_app(lambda: client, AdminToken(TOKEN)))
    headers = {"authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http:
        answer = await http.get(f"/report{query}")
    await client.close()
    return answer


async def test_grpc_and_http_say_what_the_service_says(server: ControlServer) -> None:
    said = await server.service.report(QUERY)
    assert [row.values for row in said.rows] == [("acme", "canary"), ("acme", "control"), ("[bold]mallory", "default")]
    assert said.rows[0].explanation is not None
    assert said.rows[2].break_even is None
    client = ControlClient(server.address, TOKEN)
    assert await client.report(QUERY) == said
    await client.close()
    answer = await over_http(server, "?window=1m&by=tenant,variant")
    assert answer.json() == json.loads(json.dumps(asdict(said)))
    (comparison,) = answer.json()["comparisons"]
    assert comparison["tpot_p50"] == pytest.approx(2.0, rel=0.04)


async def test_without_a_query_the_last_ten_minutes_come_by_model_and_variant(server: ControlServer) -> None:
    answer = (await over_http(server, "")).json()
    assert (answer["window"], answer["by"]) == ("10m", ["model", "variant"])


@pytest.mark.parametrize(("query", "field"), [("?window=5m", "window"), ("?by=user", "by"), ("?by=tenant,", "by")])
async def test_a_bad_query_names_the_field(server: ControlServer, query: str, field: str) -> None:
    answer = await over_http(server, query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


async def test_nothing_is_told_without_the_token(server: ControlServer) -> None:
    assert (await over_http(server, "", token="wrong")).status_code == 401
    client = ControlClient(server.address, "wrong")
    with pytest.raises(RequestError) as failure:
        await client.report(QUERY)
    assert failure.value.kind is ErrorKind.UNAUTHENTICATED
    await client.close()


# --- the command -----------------------------------------------------------------------------------------------------


def printed(monkeypatch: pytest.MonkeyPatch, report: Report, *options: str) -> str:
    """What the command prints when the API answers with a report."""
    asked: list[Any] = []

    def call(method: str, url: str, path: str, **params: Any) -> Any:
        asked.append((method, path, params))
        return json.loads(json.dumps(asdict(report)))

    monkeypatch.setattr(cluster.cli.report, "call", call)
    monkeypatch.setattr(cluster.cli.report.console, "width", 80)
    result = typer.testing.CliRunner().invoke(app, ["report", *options])
    assert result.exit_code == 0, result.output
    assert asked == [("GET", "report", {"window": "10m", "by": "tenant,variant"})]
    return result.output


async def test_the_command_prints_a_table_ratios_and_explanations(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = printed(monkeypatch, await server.service.report(QUERY), "--by", "tenant,variant")
    assert "13 requests finished since" in text
    (mallory,) = (line for line in text.splitlines() if "mallory" in line)
    cells = [cell.strip() for cell in mallory.split("│")[1:-1]]
    assert cells[:5] == ["[bold]mallory", "default", "1", "0.0%", "0.0%"]
    assert cells[5:] == ["100.3, 100.3", "10.1, 10.1", "19.8, 30.6", "1.00", ""]
    assert "canary / control" in text
    assert "speculation does not pay for tenant acme, variant canary: acceptance length 1.50 is below" in text


async def test_the_command_gives_programs_everything(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    said = await server.service.report(QUERY)
    assert json.loads(printed(monkeypatch, said, "--by", "tenant,variant", "--json")) == json.loads(
        json.dumps(asdict(said))
    )


async def test_the_command_says_so_where_nothing_has_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with control_server(tmp_path / "empty.db") as empty:
        text = printed(monkeypatch, await empty.service.report(QUERY), "--by", "tenant,variant")
    assert text.startswith("0 requests finished since")
