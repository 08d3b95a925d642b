"""One engine's server process: starts it, waits until it answers, freezes it while others are measured, ends it."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from load_tests.compare import process_tree
from load_tests.compare.guard import Guard
from load_tests.compare.peers.base import AbsentError, Say, ServerCommand
from load_tests.compare.usage import CpuTimes, Usage

START_LIMIT_S = 600.0
_IDLE_SHARE, _IDLE_SAMPLE_S, _IDLE_LIMIT_S = 0.1, 0.5, 10.0
_SAMPLE_S = 1.0  # reading every process's figures takes milliseconds on the cores that are measured


@dataclass(slots=True)
class Server:
    """Owns a running server, its log, and the highest memory seen while it was awake."""

    port: int
    ready_path: str
    log: Path
    process: subprocess.Popen[bytes]
    guard: Guard
    peak_rss_mib: float = 0.0

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run, and freeze it afterwards. Its memory is sampled meanwhile.

        Timers have run out while it was frozen: connections between its processes may be closed as they are used, and
        what they do from time to time is overdue. So it is asked until it answers, and left alone until it has caught
        up. Raises AbsentError if it does not answer.
        """
        process_tree.wake(self.process.pid)
        _wait_until_ready(self, lambda line: None)
        _wait_until_idle(self)
        done = threading.Event()
        sampler = threading.Thread(target=self._sample, args=(done,), daemon=True)
        sampler.start()
        try:
            yield
        finally:
            done.set()
            sampler.join()
            self.freeze()

    def freeze(self) -> None:
        process_tree.freeze(self.process.pid)

    def cpu_times(self, cores: tuple[int, ...]) -> CpuTimes:
        return CpuTimes.read(self.process.pid, cores)

    def usage_since(self, before: CpuTimes, cores: tuple[int, ...]) -> Usage:
        now = self.cpu_times(cores)
        self.sample_memory()
        return Usage(
            peak_rss_mib=self.peak_rss_mib,
            pss_mib=process_tree.pss_mib(self.process.pid),
            engine_cores=now.engine_cores_since(before),
            others_share=now.others_share_since(before, len(cores)),
        )

    def sample_memory(self) -> None:
        self.peak_rss_mib = max(self.peak_rss_mib, process_tree.rss_mib(self.process.pid))

    def _sample(self, done: threading.Event) -> None:
        while not done.wait(_SAMPLE_S):
            self.sample_memory()


def start_server(command: ServerCommand, port: int, log: Path, guard: Guard, say: Say) -> Server:
    """Returns when it answers. Raises AbsentError with its last words if it ends, or takes too long."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the terminal's Ctrl-C is this program's to pass on
        )
    server = Server(port, command.ready_path, log, process, guard)
    guard.watch(process.pid)
    try:
        _wait_until_ready(server, say)
    except BaseException:
        end_servers([server])
        raise
    return server


def end_servers(servers: Collection[Server]) -> None:
    """All at once, so that the slowest says how long it takes."""
    process_tree.end(server.process.pid for server in servers)
    for server in servers:
        server.process.wait()
        server.guard.release(server.process.pid)


def _wait_until_ready(server: Server, say: Say) -> None:
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < START_LIMIT_S:
        if server.process.poll() is not None:
            raise AbsentError(f"its server ended with status {server.process.returncode}: {last_words(server.log)}")
        say(f"starting, {waited:.0f} s")
        if _answers(server.port, server.ready_path):
            return
        time.sleep(0.25)
    raise AbsentError(f"its server did not answer within {START_LIMIT_S:.0f} s: {last_words(server.log)}")


def _wait_until_idle(server: Server) -> None:
    """Until it takes up little of a core, or for a while if it never rests."""
    deadline = time.monotonic() + _IDLE_LIMIT_S
    busy_s = _IDLE_SAMPLE_S
    while busy_s > _IDLE_SHARE * _IDLE_SAMPLE_S and time.monotonic() < deadline:
        before = process_tree.cpu_s(server.process.pid)
        time.sleep(_IDLE_SAMPLE_S)
        busy_s = process_tree.cpu_s(server.process.pid) - before


def _answers(port: int, path: str) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == HTTPStatus.OK
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def last_words(log: Path) -> str:
    """The last line that says something, and where the rest is."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1][:300] if lines else 'no output'} (see {log})"
