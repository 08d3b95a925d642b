"""How other threads reach an engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

CommandT = TypeVar("CommandT")


class Inbox(Generic[CommandT]):
    """Owns the commands that no step has seen yet, with the times they came, and wakes the thread that takes them.

    Any thread may put and wake; one thread takes and waits.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queue: SimpleQueue[list[tuple[float, CommandT]]] = SimpleQueue()
        self._taken: list[tuple[float, CommandT]] = []

    def put(self, commands: Sequence[CommandT]) -> None:
        now = self._clock()
        self._queue.put([(now, command) for command in commands])

    def wake(self) -> None:
        """End a wait, or the next one, without a command."""
        self._queue.put([])

    def has_waiting(self) -> bool:
        """Whether there is something to take, or a wake-up."""
        return not self._queue.empty()

    def take(self) -> list[tuple[float, CommandT]]:
        """Every (time it came, command) put so far, in order."""
        for _ in range(self._queue.qsize()):  # not until empty, so that a flood cannot keep the thread from its steps
            self._taken += self._queue.get_nowait()
        taken, self._taken = self._taken, []
        return taken

    def wait(self, deadline: float | None) -> None:
        """Sleep until something comes, or until `deadline` on the clock; None: no limit."""
        timeout = None if deadline is None else deadline - self._clock()
        if timeout is not None and timeout <= 0:
            return
        try:
            self._taken += self._queue.get(timeout=timeout)
        except Empty:
            return
