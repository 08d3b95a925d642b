"""Reads operators' documents, YAML or JSON, so strictly that what is accepted means one thing only. Pure.

A text becomes plain values (mappings with string keys, lists, strings, numbers, booleans, null), and those a frozen
pydantic model. Every flaw is reported with the path to its field. Whatever a text contains, DocumentError is the only
exception: aliases (and so exponential expansion), duplicate keys, keys that are no strings, NaN, infinities, integers
beyond 64 bits, tags, deep nesting and oversize are flaws like any other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.control.document_text import MAX_DEPTH, MAX_DOCUMENT_BYTES, Pairs, Refused, read, too_deep, too_large
from cluster.control.flaws import MAX_FLAWS, WHOLE, DocumentError, Flaw, flaws_of, shown

_MAX_INT: Final = 2**63 - 1


class StrictModel(BaseModel):
    """Base of every part of a document: frozen, no unknown keys, no coercion, no NaN.

    A validator may raise a PydanticCustomError whose context has `at`: the rest of the path to the field it means.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=StrictModel)


def parse(model: type[Model], source: str | Mapping[str, object]) -> Model:
    """A text or its plain values as a `model`. Raises DocumentError."""
    reader = _PlainValues()
    values = reader.plain(read(source) if isinstance(source, str) else source, "", 0)
    if reader.flaws:
        raise DocumentError(reader.flaws)
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()
    if len(text) > MAX_DOCUMENT_BYTES and not isinstance(source, str):
        raise too_large(len(text))
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[:MAX_FLAWS]
        raise DocumentError(flaws_of(details)) from error


# --- plain values ----------------------------------------------------------------------------------------------------


class _PlainValues:
    """Copies values while it checks them, and collects what is wrong."""

    def __init__(self) -> None:
        self.flaws: list[Flaw] = []

    def plain(self, value: object, path: str, depth: int) -> object:
        """A copy of the value; of no meaning once there are flaws."""
        if depth > MAX_DEPTH:
            self._add(too_deep(path))
            return None
        if isinstance(value, (Pairs, Mapping)):
            return self._mapping(value.items() if isinstance(value, Mapping) else value, path, depth)
        if isinstance(value, (list, tuple)):
            return [self.plain(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        if (flaw := _scalar_flaw(value, path)) is not None:
            self._add(flaw)
        return value

    def _mapping(self, pairs: Iterable[tuple[object, object]], path: str, depth: int) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in pairs:
            at = f"{path}.{_shown(key)}".removeprefix(".")
            if not isinstance(key, str) or not _is_text(key):
                self._add(Flaw(at, "a key should be a string"))
            elif key in found:
                self._add(Flaw(at, "the key is there twice"))
            else:
                found[key] = self.plain(value, at, depth + 1)
        return found

    def _add(self, flaw: Flaw) -> None:
        self.flaws.append(flaw if flaw.path else replace(flaw, path=WHOLE))


def _scalar_flaw(value: object, path: str) -> Flaw | None:
    match value:
        case None | bool():
            return None
        case str():
            return None if _is_text(value) else Flaw(path, "not Unicode text")
        case int():
            return None if -_MAX_INT <= value <= _MAX_INT else Flaw(path, "the number is too large", "64 bits")
        case float():
            return None if math.isfinite(value) else Flaw(path, "should be a finite number")
        case Refused(message):
            return Flaw(path, message)
        case _:
            return Flaw(path, f"{type(value).__name__} is not a plain value")


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _shown(key: object) -> str:
    """A key of any kind within a path."""
    return shown(key if isinstance(key, str) else "?" if isinstance(key, (Pairs, list, Refused)) else str(key))
