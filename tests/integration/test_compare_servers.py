"""The comparison with real server processes: measured in turn, frozen in between, gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from load_tests.bench import free_port
from load_tests.compare.guard import guarding
from load_tests.compare.measure import measured
from load_tests.compare.peers.base import Arm, Conditions, PeerName, Say, ServerCommand
from load_tests.compare.process_tree import freeze, tree, wake
from load_tests.compare.scenario import Load, Scenario
from load_tests.compare.server import end_servers, start_server
from load_tests.compare.workload import Ask, Closed

pytestmark = pytest.mark.integration

# Has a child, and streams as many tokens as it is asked for. Once frozen, it drops the first connection afterwards.
STUB = """
import json, signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)

stale = []
signal.signal(signal.SIGCONT, lambda *_: stale.append(True))

class Handler(BaseHTTPRequestHandler):
    def handle(self):
        if stale:
            stale.clear()
        else:
            super().handle()

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        for _ in range(request["max_tokens"]):
            self.say({"choices": [{"text": "x", "finish_reason": None}]})
        self.say({"choices": [], "usage": {"completion_tokens": request["claimed"]}})

    def say(self, event):
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")

    def log_message(self, *arguments):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Stub:
    """An engine whose server is the script above; it may count its tokens wrongly."""

    def __init__(self, *, miscounts_by: int = 0) -> None:
        self._miscounts_by = miscounts_by

    def prepare(self, conditions: Conditions, say: Say) -> None:
        """Nothing to do."""

    def server_of(self, arm: Arm) -> Arm:
        return arm

    def command(self, arm: Arm, conditions: Conditions, port: int) -> ServerCommand:
        return ServerCommand((sys.executable, "-c", STUB, str(port)), {}, "/health")

    def body(self, arm: Arm, ask: Ask) -> dict[str, object]:
        return {"max_tokens": ask.max_tokens, "claimed": ask.max_tokens + self._miscounts_by}


class Broken(Stub):
    """An engine whose server says why it cannot run, and ends."""

    def command(self, arm: Arm, conditions: Conditions, port: int) -> ServerCommand:
        return ServerCommand((sys.executable, "-c", "raise SystemExit('no AVX-512 here')"), {}, "/health")


@pytest.fixture
def conditions(tmp_path: Path) -> Conditions:
    return Conditions(tmp_path, tmp_path, tmp_path, (0,), 1, 64, 2, 4)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def runs(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}") and state(pid) not in "ZX"


def test_engines_take_turns_and_one_that_breaks_or_miscounts_is_absent_with_the_reason(conditions: Conditions) -> None:
    good, broken, wrong = Arm(PeerName.PACELINE), Arm(PeerName.VLLM), Arm(PeerName.LLAMA_CPP)
    peers = {good.peer: Stub(), broken.peer: Broken(), wrong.peer: Stub(miscounts_by=1)}
    load = Load(Closed(2), requests=4, max_tokens=3)
    scenario = Scenario("stubs", (good, broken, wrong), (load,), max_model_len=64, rounds=2)
    with measured(scenario, conditions, peers, ((1,), (2,)), lambda line: None) as results:
        pass
    assert len(results.rounds[good, load]) == 2
    assert all(min(figures.tok_s, figures.peak_rss_mib, figures.pss_mib) > 0 for figures in results.rounds[good, load])
    assert list(results.rounds) == [(good, load)]
    assert "no AVX-512 here" in results.absent[broken]
    assert "the answer has 4 tokens, 3 were asked for" in results.absent[wrong]


def test_a_server_is_frozen_with_all_of_its_processes_and_leaves_none_behind(conditions: Conditions) -> None:
    arm = Arm(PeerName.PACELINE)
    port = free_port()
    with guarding() as guard:
        command = Stub().command(arm, conditions, port)
        server = start_server(command, port, conditions.cache / "log", guard, lambda line: None)
        members = tree(server.process.pid)
        assert len(members) == 2
        freeze(server.process.pid)
        assert [state(pid) for pid in members] == ["T", "T"]
        wake(server.process.pid)
        assert "T" not in [state(pid) for pid in members]
        freeze(server.process.pid)
        end_servers([server])
        assert not any(map(runs, members))


def test_servers_of_a_comparison_that_was_killed_are_ended_even_if_frozen() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        freeze(child.pid)
        with guarding() as guard:  # its process sees what it would see if this one died
            guard.watch(child.pid)
        assert child.wait() == -signal.SIGTERM
