"""What clients send becomes a grammar; strings to choose from are taken literally."""

from __future__ import annotations

import pytest
from pydantic_core import PydanticCustomError

from cluster.messages.request import Grammar, GrammarKind
from cluster.transport.structured_output import ANY_OBJECT, parse_response_format, parse_structured_outputs
from tests.unit.test_grammar_compiler import matches

pytestmark = pytest.mark.unit

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "null"}}}
TEXT = '{"type":"object","properties":{"b":{"type":"string"},"a":{"type":"null"}}}'


def named(**fields: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, **fields}}


@pytest.mark.parametrize(
    ("value", "grammar"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, ANY_OBJECT),
        (named(), Grammar(GrammarKind.JSON_SCHEMA, TEXT)),
        (named(strict=True, description="d"), Grammar(GrammarKind.JSON_SCHEMA, TEXT)),
        (named(strict=None, schema=True), Grammar(GrammarKind.JSON_SCHEMA, "true")),
    ],
    ids=str,
)
def test_a_response_format_is_a_grammar_with_its_keys_in_order(value: object, grammar: Grammar | None) -> None:
    assert parse_response_format(value) == grammar


@pytest.mark.parametrize(
    ("value", "grammar"),
    [
        (None, None),
        ({"json_object": True}, ANY_OBJECT),
        ({"json": SCHEMA, "regex": None}, Grammar(GrammarKind.JSON_SCHEMA, TEXT)),
        ({"json": TEXT}, Grammar(GrammarKind.JSON_SCHEMA, TEXT)),
        ({"regex": "a|b"}, Grammar(GrammarKind.REGEX, "a|b")),
    ],
    ids=str,
)
def test_structured_outputs_are_a_grammar(value: object, grammar: Grammar | None) -> None:
    assert parse_structured_outputs(value) == grammar


STRINGS = ["a.b", "(c)|d", "e+f*", "[g]{2}", "\\d", "^h$", "i?", "/j/", "k # l", " m-n ", "~&<>", "new\nline", "ö"]


@pytest.mark.parametrize("string", STRINGS)
def test_a_choice_is_taken_literally(string: str) -> None:
    grammar = parse_structured_outputs({"choice": STRINGS})
    assert grammar is not None
    assert matches(grammar, string)
    assert not matches(grammar, string + string)
    assert not matches(grammar, "axb")
    assert not matches(grammar, "d")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (named(strict="yes"), "strict"),
        (named(description=1), "description"),
        (named(name="a b"), "name"),
        (named(more=1), "unknown key: more"),
        (named(schema={"enum": ["x" * 65_536]}), "1 to 65536 characters"),
        (named(schema={"minimum": float("nan")}), "no JSON"),
    ],
)
def test_what_is_wrong_is_said(value: object, says: str) -> None:
    with pytest.raises(PydanticCustomError, match=says):
        parse_response_format(value)
