"""Virtual environments of other engines, made on first use and kept."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from load_tests.compare.peers.base import AbsentError, Say

_SAID_LENGTH = 100


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment with some packages of the Python package index, and what is taken out of it again."""

    folder: Path
    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()
    build_environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return next((self.folder / "venv" / "lib").glob("python*/site-packages"))

    def ensure(self, say: Say) -> None:
        """Make it unless it is complete for these requirements. Raises AbsentError with pip's last words."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._marker.is_file() and self._marker.read_text() == self._wanted():
                return
            shutil.rmtree(self.folder / "venv", ignore_errors=True)
            self._run([sys.executable, "-m", "venv", str(self.folder / "venv")], say)
            self._pip(["install", "--verbose", *self.requirements], say)
            if self.removed:
                self._pip(["uninstall", "--yes", *self.removed], say)
            self._marker.write_text(self._wanted())

    @property
    def _marker(self) -> Path:
        return self.folder / "venv" / "complete"

    def _wanted(self) -> str:
        return "\n".join((sys.version, *self.requirements, *(f"without {name}" for name in self.removed)))

    def _pip(self, arguments: list[str], say: Say) -> None:
        self._run([str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments], say)

    def _run(self, command: list[str], say: Say) -> None:
        """Raises AbsentError when the command fails."""
        log, begun, last = self.folder / "install.log", time.monotonic(), ""
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **self.build_environment}
        environment.pop("PYTHONPATH", None)
        with (
            log.open("a") as output,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
            ) as child,
        ):
            assert child.stdout is not None
            for line in child.stdout:
                output.write(line)
                if line.strip():
                    last = line.strip()
                    say(f"installing, {time.monotonic() - begun:.0f} s: {last[:_SAID_LENGTH]}")
        if child.returncode:
            raise AbsentError(f"cannot be installed: {last} (see {log})")
