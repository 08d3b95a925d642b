"""Reads operators' documents, YAML or JSON, so strictly that what is accepted means one thing only. Pure.

A text becomes plain values (mappings with string keys, lists, strings, numbers, booleans, null), and those a frozen
pydantic model. Every flaw is reported with the path to its field. Whatever a text contains, DocumentError is the only
exception: aliases (and so exponential expansion), duplicate keys, keys that are no strings, NaN, infinities, integers
beyond 64 bits, tags, deep nesting and oversize are flaws like any other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

try:
    from yaml import CSafeLoader as _Loader
except ImportError:  # a PyYAML built without libyaml: slower, otherwise the same
    from yaml import SafeLoader as _Loader  # type: ignore[assignment]

MAX_DOCUMENT_BYTES: Final = 256 * 1024
MAX_DEPTH: Final = 16
MAX_FLAWS: Final = 1000  # reported of one document
WHOLE: Final = "document"  # the path of a flaw that no field has

_MAX_INT: Final = 2**63 - 1
_MAX_INT_CHARS: Final = 20  # more digits than 64 bits have; int() of a very long text is slow, or refused
_TOO_LARGE: Final = 2**64


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


class StrictModel(BaseModel):
    """Base of every part of a document: frozen, no unknown keys, no coercion, no NaN.

    A validator may raise a PydanticCustomError whose context has `at`: the rest of the path to the field it means.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=StrictModel)


def parse(model: type[Model], source: str | Mapping[str, object]) -> Model:
    """A text or its plain values as a `model`. Raises DocumentError."""
    reader = _PlainValues()
    values = reader.plain(_read(source) if isinstance(source, str) else source, "", 0)
    if reader.flaws:
        raise DocumentError(reader.flaws)
    text = json.dumps(values)
    if len(text) > MAX_DOCUMENT_BYTES and not isinstance(source, str):
        raise _too_large(len(text))
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        raise DocumentError(map(_flaw, details[:MAX_FLAWS])) from error


# --- text ------------------------------------------------------------------------------------------------------------


class _Pairs(tuple[tuple[object, object], ...]):
    """A mapping as it was written: in order, duplicates and odd keys included."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Refused:
    """Stands where something was that no document may contain."""

    message: str


def _read(text: str) -> object:
    """What the text says, as pairs, lists and scalars. A text that starts with a brace is JSON, any other is YAML."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise DocumentError([Flaw(WHOLE, f"character {error.start} is not Unicode text")]) from error
    if size > MAX_DOCUMENT_BYTES:
        raise _too_large(size)
    return _read_json(text) if text.lstrip("\ufeff \t\r\n").startswith("{") else _read_yaml(text)


def _too_large(size: int) -> DocumentError:
    return DocumentError([Flaw(WHOLE, f"{size} bytes are too many", f"at most {MAX_DOCUMENT_BYTES} bytes")])


def _read_json(text: str) -> object:
    try:
        return json.loads(text.lstrip("\ufeff"), object_pairs_hook=_Pairs, parse_int=_parse_int)
    except json.JSONDecodeError as error:
        raise DocumentError([Flaw(WHOLE, f"not JSON: line {error.lineno}: {error.msg}")]) from error
    except RecursionError as error:
        raise DocumentError([_too_deep(WHOLE)]) from error


def _parse_int(digits: str) -> int:
    return int(digits) if len(digits) <= _MAX_INT_CHARS else _TOO_LARGE


def _read_yaml(text: str) -> object:
    try:
        _check_depth(text)
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise DocumentError([Flaw(WHOLE, f"not YAML: {where}{error.problem or error.context}")]) from error
    except yaml.YAMLError as error:
        raise DocumentError([Flaw(WHOLE, f"not YAML: {str(error).splitlines()[0]}")]) from error
    return None if root is None else _YamlValues().value(root)


def _check_depth(text: str) -> None:
    """Composing recurses, so nesting is bounded before."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise DocumentError([_too_deep(WHOLE)])


class _YamlValues:
    """Turns composed nodes into values. An alias is a node that is met twice."""

    def __init__(self) -> None:
        self._met: set[int] = set()
        self._construct = yaml.constructor.SafeConstructor()

    def value(self, node: yaml.Node) -> object:
        if id(node) in self._met:
            return _Refused("aliases are not allowed")
        self._met.add(id(node))
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return _Pairs((self.value(key), self.value(item)) for key, item in node.value)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.value(item) for item in node.value]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, kind)
        return _Refused(f"the tag {kind[:64]!r} is not allowed")

    def _scalar(self, node: yaml.ScalarNode, kind: str) -> object:
        try:
            match kind:
                case "str" | "timestamp" | "merge" | "value":  # a date is a good name for a salt
                    return str(node.value)
                case "null":
                    return None
                case "bool":
                    return self._construct.construct_yaml_bool(node)
                case "int":
                    return self._construct.construct_yaml_int(node) if len(node.value) <= _MAX_INT_CHARS else _TOO_LARGE
                case "float":
                    return self._construct.construct_yaml_float(node)
        except (ValueError, KeyError, IndexError):
            return _Refused(f"{node.value[:64]!r} is not of the type that its tag says")
        return _Refused(f"the tag {kind[:64]!r} is not allowed")


# --- plain values ----------------------------------------------------------------------------------------------------


class _PlainValues:
    """Copies values while it checks them, and collects what is wrong."""

    def __init__(self) -> None:
        self.flaws: list[Flaw] = []

    def plain(self, value: object, path: str, depth: int) -> object:
        """A copy of the value; of no meaning once there are flaws."""
        if depth > MAX_DEPTH:
            self._add(_too_deep(path))
            return None
        if isinstance(value, (_Pairs, Mapping)):
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
        case _Refused(message):
            return Flaw(path, message)
        case _:
            return Flaw(path, f"{type(value).__name__} is not a plain value")


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _shown(key: object) -> str:
    """A key within a path: short, and without anything that could break a line."""
    text = key if isinstance(key, str) else "?" if isinstance(key, (_Pairs, list, _Refused)) else str(key)
    return ascii(text[:64])[1:-1]


def _too_deep(path: str) -> Flaw:
    return Flaw(path, "nested too deeply", f"at most {MAX_DEPTH} levels")


# --- pydantic's errors -----------------------------------------------------------------------------------------------

_MESSAGES: Final = {"extra_forbidden": "unknown field", "missing": "the field is required"}
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


def _flaw(error: ErrorDetails) -> Flaw:
    context: Mapping[str, Any] = error.get("ctx", {})
    path = _path(error["loc"]) + str(context.get("at", ""))
    limits = (text.format(context[name]) for name, text in _LIMITS.items() if context.get(name) is not None)
    return Flaw(path.removeprefix(".") or WHOLE, _MESSAGES.get(error["type"], error["msg"]), next(limits, None))


def _path(location: Sequence[int | str]) -> str:
    return "".join(_steps(location))


def _steps(location: Sequence[int | str]) -> Iterator[str]:
    for part in location:
        yield f"[{part}]" if isinstance(part, int) else f".{_shown(part)}"
