"""What commands send to a cluster, and what they make of its answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster.cli import app

pytestmark = pytest.mark.contract

MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "p"}]}
CHUNK = {
    "id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m",
    "choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": None}],
}  # fmt: skip
INFO = {"kind": "policy", "version": 3, "author": "[/]", "reason": "[bold]:bug: x[/]", "written_at": 0.0, "diff": "+a",
        "restores": None}  # fmt: skip
ENTRY = {"sequence": 7, "at": 0.0, "actor": "ann", "action": "policy.apply", "target": "policy", "outcome": "version 3",
         "detail": "[/why]"}  # fmt: skip


class Server:
    """A cluster's HTTP port: answers by path, and keeps who asked for what."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []  # path, authorization
        self.answers: dict[str, tuple[int, str, bytes]] = {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                server.asked.append((self.path, self.headers.get("authorization")))
                self.rfile.read(int(self.headers.get("content-length") or 0))
                status, content_type, body = server.answers.get(self.path, (404, "text/plain", b"nothing"))
                self.send_response(status)
                self.send_header("content-type", content_type)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = _answer

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()

    def says(self, path: str, answer: object, status: int = 200) -> None:
        self.answers[path] = (status, "application/json", json.dumps(answer).encode())

    def streams(self, path: str, *events: object) -> None:
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self.answers[path] = (200, "text/event-stream", lines.encode())

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("PACELINE_ADMIN_TOKEN", "token")
    monkeypatch.delenv("PACELINE_API_KEY", raising=False)
    server = Server()
    server.says("/v1/models", MODELS)
    server.streams("/v1/chat/completions", CHUNK)
    yield server
    server.close()


def run(server: Server, *arguments: str, stdin: str | None = None, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, [*arguments, "--url", server.url], input=stdin, env=env)


@pytest.mark.parametrize("command", [("generate", "hi"), ("chat",)])
@pytest.mark.parametrize(
    ("options", "env"), [(["--api-key", "pl-key"], {}), ([], {"PACELINE_API_KEY": "pl-key"})], ids=["option", "env"]
)
def test_talking_sends_the_api_key_with_every_call(
    server: Server, command: tuple[str, ...], options: list[str], env: dict[str, str]
) -> None:
    result = run(server, *command, *options, stdin="hi\n", env=env)
    assert "Hello" in result.output
    assert server.asked == [("/v1/models", "Bearer pl-key"), ("/v1/chat/completions", "Bearer pl-key")]


@pytest.mark.parametrize("command", [("generate", "hi"), ("generate", "hi", "--model", "m")])
def test_a_missing_key_is_said_in_the_servers_words(server: Server, command: tuple[str, ...]) -> None:
    refusal = {"error": {"message": "You didn't provide an API key", "type": "t", "param": None, "code": "c"}}
    server.says("/v1/models", refusal, 401)
    server.says("/v1/chat/completions", refusal, 401)
    result = run(server, *command)
    assert (result.exit_code, result.stderr) == (1, "error: You didn't provide an API key\n")


def test_an_error_inside_a_stream_ends_the_command(server: Server) -> None:
    server.streams("/v1/chat/completions", CHUNK, {"error": {"message": "The request failed", "type": "server_error"}})
    result = run(server, "generate", "hi")
    assert (result.exit_code, "The request failed" in result.stderr) == (1, True)


def test_what_others_wrote_is_printed_as_they_wrote_it(server: Server) -> None:
    server.says("/admin/v1/policy/versions?limit=20", [INFO])
    server.says("/admin/v1/audit?limit=20", [ENTRY])
    for arguments in (["policy", "history"], ["policy", "history", "--diff"]):
        result = run(server, *arguments)
        assert (result.exit_code, "[bold]:bug: x[/]" in result.output) == (0, True), result.output
    result = run(server, "audit")
    assert (result.exit_code, "[/why]" in result.output) == (0, True), result.output
    server.says("/admin/v1/policy/rollback", {"error": {"message": "no [/such] version"}}, 404)
    assert "no [/such] version" in run(server, "policy", "rollback", "3").stderr


def test_a_table_is_printed_whole_into_a_file(server: Server) -> None:
    server.says("/admin/v1/audit?limit=20", [ENTRY | {"detail": "why " * 200, "actor": "a" * 100}])
    output = run(server, "audit").output
    assert "why " * 200 in output
    assert "a" * 100 in output
    assert "policy.apply" in output


def test_status_tells_the_versions_of_replicas_apart(server: Server) -> None:
    load = {"num_total_blocks": 8, "num_free_blocks": 6, "num_running": 1, "num_waiting": 0, "peak_used_blocks": 4,
            "draining": False}  # fmt: skip
    new = {"model": "m", "pool": "draft", "version": "v2", "replica_id": "r2", "load": load}
    old = {"model": "m", "pool": "target", "version": None, "replica_id": "r1", "load": None}
    server.says("/status", {"replicas": [old, new], "models": []})
    rows = [line.replace("│", " ").split() for line in run(server, "status").output.splitlines()]
    assert ["m", "draft", "v2", "r2", "1", "0", "2/8", "(25%)", "50%", "ready"] in rows
    assert ["m", "target", "r1", "connecting"] in rows


def test_bytes_that_are_no_text_are_refused(server: Server) -> None:
    result = run(server, "speculation", "off", "--tenant", "a\udcff")
    assert (result.exit_code, "not Unicode text" in result.stderr, server.asked) == (1, True, [])


def test_a_token_that_no_header_can_carry_is_refused_before_anything_is_asked(server: Server) -> None:
    for token in ("schlüssel", "a\nb"):
        result = run(server, "audit", env={"PACELINE_ADMIN_TOKEN": token})
        assert (result.exit_code, "printable ASCII" in result.stderr, server.asked) == (1, True, [])
    server.says("/admin/v1/audit?limit=20", [])
    assert run(server, "audit", env={"PACELINE_ADMIN_TOKEN": "token\n"}).exit_code == 0
    assert server.asked == [("/admin/v1/audit?limit=20", "Bearer token")]


@pytest.mark.parametrize("version", ["-1", "x", "1.5"])
def test_a_version_that_is_none_is_refused_before_anything_is_asked(server: Server, version: str) -> None:
    for arguments in (["rollback", "--", version], ["get", f"--version={version}"]):
        assert CliRunner().invoke(app, ["policy", arguments[0], "--url", server.url, *arguments[1:]]).exit_code == 2
    assert server.asked == []


def test_the_state_before_the_first_document_can_be_read(server: Server) -> None:
    server.says("/admin/v1/policy/versions/0", {"info": INFO, "text": "schema: paceline.policy/v1\n"})
    assert run(server, "policy", "get", "--version", "0").output == "schema: paceline.policy/v1\n"


def test_the_audit_log_is_read_page_by_page_with_the_admin_token(server: Server) -> None:
    server.says("/admin/v1/audit?limit=2&before=9", [ENTRY])
    result = run(server, "audit", "--limit", "2", "--before", "9", "--json")
    assert json.loads(result.output) == [ENTRY]
    assert server.asked == [("/admin/v1/audit?limit=2&before=9", "Bearer token")]


def test_a_base_url_may_end_as_a_browser_shows_it(server: Server) -> None:
    server.says("/admin/v1/audit?limit=20", [ENTRY])
    assert CliRunner().invoke(app, ["audit", "--url", server.url + "/"]).exit_code == 0


@pytest.mark.parametrize(
    ("url", "word"),
    [("http://127.0.0.1:1", "no Paceline answers"), ("127.0.0.1:8000", "no Paceline"), ("http://[x", "no Paceline")],
)
def test_an_address_where_nothing_answers_is_an_error_and_no_traceback(url: str, word: str, server: Server) -> None:
    for command in (["status"], ["generate", "hi"], ["audit"]):
        result = CliRunner().invoke(app, [*command, "--url", url])
        assert (result.exit_code, word in result.stderr) == (1, True), result.output


def test_something_else_at_the_address_is_an_error_and_no_traceback(server: Server) -> None:
    server.answers["/status"] = (200, "text/html", b"<html>")
    result = run(server, "status")
    assert (result.exit_code, "does not speak as Paceline does" in result.stderr) == (1, True)
    assert "404" in run(server, "audit").stderr


def test_a_secret_that_no_header_can_carry_is_refused(server: Server) -> None:
    for options in (["generate", "hi", "--api-key", "schlüssel"], ["generate", "hi", "--api-key", "a\nb"]):
        result = run(server, *options)
        assert (result.exit_code, "printable ASCII" in result.stderr) == (1, True), result.output
    assert server.asked == []


def test_documents_are_read_alike_by_every_command(server: Server) -> None:
    for command in (["policy", "check"], ["policy", "apply"], ["access", "apply"], ["rollout", "start"]):
        result = CliRunner().invoke(app, [*command, "-"], input="é" * 200_000)
        assert (result.exit_code, "at most 262144 bytes" in result.stderr) == (1, True), result.output
    assert CliRunner().invoke(app, ["policy", "check", "-"], input="schema: paceline.policy/v1\n").exit_code == 0
