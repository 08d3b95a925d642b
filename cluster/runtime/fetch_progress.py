"""How far a download or a conversion is, and how a person gets to see it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """`done` of `total` in one phase of fetching a model; the unit is the phase's own (bytes, tensors)."""

    phase: str
    done: int
    total: int


ProgressCallback = Callable[[FetchProgress], None]


def ignore_progress(progress: FetchProgress) -> None:
    """For callers that show nothing."""


@contextmanager
def show_progress(console: Console | None = None) -> Iterator[ProgressCallback]:
    """A bar per phase on a terminal, else one log line per started and per finished phase."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _LogLines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        yield _Bars(bars)


class _Bars:
    """Owns the terminal's bars, one per phase."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, progress: FetchProgress) -> None:
        if progress.phase not in self._tasks:
            self._tasks[progress.phase] = self._bars.add_task(progress.phase, total=progress.total)
        self._bars.update(self._tasks[progress.phase], completed=progress.done, total=progress.total)


class _LogLines:
    """Owns what has been said already, so that each phase says two lines and no more."""

    def __init__(self) -> None:
        self._started: set[str] = set()
        self._finished: set[str] = set()

    def __call__(self, progress: FetchProgress) -> None:
        if progress.phase not in self._started:
            self._started.add(progress.phase)
            logger.info("%s: started", progress.phase)
        if progress.done >= progress.total and progress.phase not in self._finished:
            self._finished.add(progress.phase)
            logger.info("%s: done", progress.phase)
