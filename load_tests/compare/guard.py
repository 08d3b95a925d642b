"""Ends the servers of a comparison that was killed: frozen ones would stay for ever, and the rest for long.

    python -m load_tests.compare.guard

reads `watch PID` and `release PID` lines; when its input ends, it ends the trees of those that are still watched.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from load_tests.compare.process_tree import end


class Guard:
    """Owns the process that outlives this one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def watch(self, pid: int) -> None:
        self._tell(f"watch {pid}")

    def release(self, pid: int) -> None:
        self._tell(f"release {pid}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


@contextmanager
def guarding() -> Iterator[Guard]:
    """What is watched and not released when the block, or this process, ends is ended."""
    command = [sys.executable, "-m", "load_tests.compare.guard"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True) as process:
        yield Guard(process)


def watched_at_the_end(lines: Iterable[str]) -> list[int]:
    """The process ids that were watched and not released."""
    watched: dict[int, None] = {}
    for line in lines:
        verb, pid = line.split()
        if verb == "watch":
            watched[int(pid)] = None
        else:
            watched.pop(int(pid), None)
    return list(watched)


if __name__ == "__main__":
    end(watched_at_the_end(sys.stdin))
