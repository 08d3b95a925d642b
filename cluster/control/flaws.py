"""What is wrong with a document: where, what, and which limit it breaks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import ErrorDetails

MAX_FLAWS: Final = 1000  # reported of one document
WHOLE: Final = "document"  # the path of a flaw that no field has


@dataclass(frozen=True, slots=True)
class Flaw:
    """One thing that is wrong. path: `rules[3].match.temperature.min`; limit: the bound that was broken, if any."""

    path: str
    message: str
    limit: str | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" + (f" ({self.limit})" if self.limit else "")


class DocumentError(ValueError):
    """A document that cannot be used, with everything that is wrong with it."""

    def __init__(self, flaws: Iterable[Flaw]) -> None:
        self.flaws = tuple(flaws)[:MAX_FLAWS]
        super().__init__("; ".join(map(str, self.flaws)))


def shown(key: str) -> str:
    """A key within a path: short, and without anything that could break a line."""
    return ascii(key[:64])[1:-1]


# --- pydantic's errors -----------------------------------------------------------------------------------------------

_MESSAGES: Final = {
    "extra_forbidden": "unknown field",
    "missing": "the field is required",
    "string_type": "should be a string; quotes make one of a number or a word like true",
    "too_short": "has {actual_length} items",
    "too_long": "has {actual_length} items",
}
_LIMITS: Final = {
    "ge": "at least {}",
    "gt": "above {}",
    "le": "at most {}",
    "lt": "below {}",
    "min_length": "at least {} long",
    "max_length": "at most {} long",
    "expected": "one of {}",
    "pattern": "pattern {}",
    "limit": "{}",
}


_IN_KEY: Final = "[key]"  # where pydantic finds the key itself wrong: the path to its value is path enough


def flaws_of(errors: Sequence[ErrorDetails]) -> Iterator[Flaw]:
    """Without the list that is too short only because its items are no items."""
    for error in errors:
        if error["type"] != "too_short" or not any(_is_inside(other["loc"], error["loc"]) for other in errors):
            yield _flaw(error)


def _is_inside(inner: Sequence[int | str], outer: Sequence[int | str]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _flaw(error: ErrorDetails) -> Flaw:
    context: Mapping[str, Any] = error.get("ctx", {})
    path = _path(error["loc"]) + str(context.get("at", ""))
    limits = (text.format(context[name]) for name, text in _LIMITS.items() if context.get(name) is not None)
    known = _MESSAGES.get(error["type"])
    message = error["msg"] if known is None else known.format_map(context)
    return Flaw(path.removeprefix(".") or WHOLE, message, next(limits, None))


def _path(location: Sequence[int | str]) -> str:
    return "".join(_steps(location))


def _steps(location: Sequence[int | str]) -> Iterator[str]:
    for part in location:
        if part == _IN_KEY:
            return
        yield f"[{part}]" if isinstance(part, int) else f".{shown(part)}"
