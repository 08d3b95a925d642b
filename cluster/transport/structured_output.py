"""What a client asks of its output's form: `response_format`, `structured_outputs`, `grammar`, as one Grammar.

Whether the grammar itself is any good is found out later, by a GrammarChecker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic_core import PydanticCustomError

from cluster.core.grammar import GrammarError
from cluster.grammar.compiler import json_source
from cluster.messages.request import MAX_GRAMMAR_CHARS, Grammar, GrammarKind

MAX_CHOICES_OF_OUTPUT = 1024
ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, json_source({"type": "object"}))

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KINDS = {1: GrammarKind.JSON_SCHEMA, 2: GrammarKind.REGEX}  # numbers of the protocol


def parse_response_format(value: object) -> Grammar | None:
    """OpenAI's field. A schema is always enforced, `strict` or not."""
    if value is None:
        return None
    fields = _object(value, {"type", "json_schema"})
    match fields.get("type"):
        case "text" | "json_object" as kind if len(fields) == 1:
            return ANY_OBJECT if kind == "json_object" else None
        case "json_schema":
            return _named_schema(fields.get("json_schema"))
    raise _bad("type should be 'text', 'json_object', or 'json_schema' with a json_schema")


def _named_schema(value: object) -> Grammar:
    fields = _object(value, {"name", "description", "schema", "strict"}, "json_schema")
    name, schema = fields.get("name"), fields.get("schema")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise _bad("json_schema.name should have 1 to 64 letters, digits, underscores or dashes")
    if not isinstance(fields.get("description"), str | None):
        raise _bad("json_schema.description should be a string")
    if not isinstance(fields.get("strict"), bool | None):
        raise _bad("json_schema.strict should be a boolean")
    return _schema(schema, "json_schema.schema")


def parse_structured_outputs(value: object) -> Grammar | None:
    """vLLM's field: exactly one of json, json_object, regex and choice."""
    if value is None:
        return None
    fields = {key: item for key, item in _object(value, set(_FORMS) | _OTHER_FORMS).items() if item is not None}
    unsupported = sorted(fields.keys() & _OTHER_FORMS)
    if unsupported:
        raise PydanticCustomError("unsupported", "{name} is not supported", {"name": unsupported[0]})
    if len(fields) != 1:
        raise _bad("give exactly one of json, json_object, regex and choice")
    ((name, item),) = fields.items()
    return _FORMS[name](item)


def parse_grammar(value: object) -> Grammar | None:
    """The gRPC message: a kind and a source."""
    if value is None:
        return None
    fields = _object(value, {"kind", "source"})
    kind = fields.get("kind")
    if kind not in _KINDS:
        raise _bad("kind should be set")
    return _grammar(_KINDS[kind], fields.get("source", ""))


def _schema(value: object, name: str) -> Grammar:
    if not isinstance(value, Mapping | bool):
        raise _bad(f"{name} should be a schema: an object")
    try:
        return _grammar(GrammarKind.JSON_SCHEMA, json_source(value))
    except GrammarError as error:
        raise _bad(str(error)) from error


def _json(value: object) -> Grammar:
    return _grammar(GrammarKind.JSON_SCHEMA, value) if isinstance(value, str) else _schema(value, "json")


def _json_object(value: object) -> Grammar:
    if value is not True:
        raise _bad("json_object should be true")
    return ANY_OBJECT


def _regex(value: object) -> Grammar:
    return _grammar(GrammarKind.REGEX, value)


def _choice(value: object) -> Grammar:
    """One of some texts."""
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise _bad("choice should be a list of strings that are not empty")
    if len(value) > MAX_CHOICES_OF_OUTPUT:
        raise _bad(f"choice should have at most {MAX_CHOICES_OF_OUTPUT} strings")
    return _grammar(GrammarKind.REGEX, "|".join(re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", item) for item in value))


_FORMS = {"json": _json, "json_object": _json_object, "regex": _regex, "choice": _choice}
_OTHER_FORMS = {
    "grammar", "structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties",
}  # fmt: skip


def _grammar(kind: GrammarKind, source: object) -> Grammar:
    if not isinstance(source, str) or not 0 < len(source) <= MAX_GRAMMAR_CHARS:
        raise _bad(f"it should be a text of 1 to {MAX_GRAMMAR_CHARS} characters")
    return Grammar(kind, source)


def _object(value: object, known: set[str], name: str = "it") -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise _bad(f"{name} should be an object")
    unknown = sorted(value.keys() - known)
    if unknown:
        raise _bad(f"{name} has an unknown key: {unknown[0][:64]}")
    return value


def _bad(message: str) -> PydanticCustomError:
    return PydanticCustomError("grammar", "{message}", {"message": message})
