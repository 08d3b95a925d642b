"""What a caller asks a report for, read from text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.control.breakdown import Window
from cluster.control.dimensions import Dimension
from cluster.control.report import DEFAULT_BY
from cluster.messages.answer import ErrorKind, RequestError


@dataclass(frozen=True, slots=True)
class ReportQuery:
    """A window, and the dimensions to break it down by: distinct ones."""

    window: Window = Window.TEN_MINUTES
    by: tuple[Dimension, ...] = DEFAULT_BY


def parse_query(window: str, by: Sequence[str]) -> ReportQuery:
    """Empty ones stand for the defaults. Raises RequestError(INVALID), naming the field and what it may be."""
    return ReportQuery(_window(window), tuple(dict.fromkeys(map(_dimension, by))) or DEFAULT_BY)


def _window(label: str) -> Window:
    if not label:
        return Window.TEN_MINUTES
    found = {window.label: window for window in Window}.get(label)
    if found is None:
        known = ", ".join(window.label for window in Window)
        raise RequestError(ErrorKind.INVALID, f"window: must be one of {known}", "window")
    return found


def _dimension(name: str) -> Dimension:
    try:
        return Dimension(name)
    except ValueError as error:
        message = f"by: {name[:64]!r} is none of {', '.join(Dimension)}"
        raise RequestError(ErrorKind.INVALID, message, "by") from error
