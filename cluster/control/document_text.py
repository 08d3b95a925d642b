"""The text of a document, YAML or JSON, as plain values, and as nothing that another reader might read otherwise. Pure.

Whatever a text contains, DocumentError is the only exception. What is wrong in one place only, such as an alias, a tag
or a duplicate key, stays in the values as it was found, for whoever knows the path to it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

import yaml

from cluster.control.flaws import WHOLE, DocumentError, Flaw

try:
    from yaml import CSafeLoader as _Loader
except ImportError:  # a PyYAML built without libyaml: slower, otherwise the same
    from yaml import SafeLoader as _Loader  # type: ignore[assignment]

MAX_DOCUMENT_BYTES: Final = 256 * 1024
MAX_DEPTH: Final = 16

_MAX_INT_CHARS: Final = 20  # more digits than 64 bits have; int() of a very long text is slow, or refused
_TOO_LARGE: Final = 2**64
# YAML 1.1 reads 010 as eight, 1:30 as ninety and `no` as false; other readers do not.
_NUMBER: Final = re.compile(
    r"[-+]?(0|[1-9][0-9]*|(0|[1-9][0-9]*)?\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?\.(nan|inf)", re.IGNORECASE
)
_BOOLEAN: Final = re.compile(r"true|false", re.IGNORECASE)


class Pairs(tuple[tuple[object, object], ...]):
    """A mapping as it was written: in order, duplicates and odd keys included."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """Stands where something was that no document may contain."""

    message: str


def read(text: str) -> object:
    """What the text says, as pairs, lists and scalars. A text that starts with a brace is JSON, any other is YAML."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise DocumentError([Flaw(WHOLE, f"character {error.start} is not Unicode text")]) from error
    if size > MAX_DOCUMENT_BYTES:
        raise too_large(size)
    return _read_json(text) if text.lstrip("\ufeff \t\r\n").startswith("{") else _read_yaml(text)


def too_large(size: int) -> DocumentError:
    return DocumentError([Flaw(WHOLE, f"{size} bytes are too many", f"at most {MAX_DOCUMENT_BYTES} bytes")])


def _read_json(text: str) -> object:
    try:
        return json.loads(text.lstrip("\ufeff"), object_pairs_hook=Pairs, parse_int=_parse_int)
    except json.JSONDecodeError as error:
        raise DocumentError([Flaw(WHOLE, f"not JSON: line {error.lineno}: {error.msg}")]) from error
    except RecursionError as error:
        raise DocumentError([too_deep(WHOLE)]) from error


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
            raise DocumentError([too_deep(WHOLE)])


class _YamlValues:
    """Turns composed nodes into values. An alias is a node that is met twice."""

    def __init__(self) -> None:
        self._met: set[int] = set()
        self._construct = yaml.constructor.SafeConstructor()

    def value(self, node: yaml.Node) -> object:
        if id(node) in self._met:
            return Refused("aliases are not allowed")
        self._met.add(id(node))
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return Pairs((self.value(key), self.value(item)) for key, item in node.value)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.value(item) for item in node.value]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, kind)
        return Refused(f"the tag {kind[:64]!r} is not allowed")

    def _scalar(self, node: yaml.ScalarNode, kind: str) -> object:
        if (doubt := _doubt(node.value, kind)) is not None:
            return Refused(doubt)
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
            return Refused(f"{node.value[:64]!r} is not of the type that its tag says")
        return Refused(f"the tag {kind[:64]!r} is not allowed")


def _doubt(text: str, kind: str) -> str | None:
    """Why a scalar means something else to another reader; None if it does not."""
    if kind == "bool" and _BOOLEAN.fullmatch(text) is None:
        return f"{text[:64]!r} may be a word, or mean true or false: write true or false, or put it in quotes"
    if kind in ("int", "float") and _NUMBER.fullmatch(text) is None:
        return f"{text[:64]!r} is no plain decimal number"
    return None


def too_deep(path: str) -> Flaw:
    return Flaw(path, "nested too deeply", f"at most {MAX_DEPTH} levels")
