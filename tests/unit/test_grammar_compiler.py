"""Grammars to masks: what they allow, that guesses are taken back, and that limits end a matcher only for a while."""

from __future__ import annotations

import json
import random

import pytest

from cluster.core.grammar import GrammarError, GrammarGuide
from cluster.grammar.compiler import GrammarCompiler, Matcher
from cluster.messages.request import Grammar, GrammarKind
from tests.fakes import EOS_ID, byte_tokenizer
from tests.grammars import PIECES, InstantGrammars, regex

pytestmark = pytest.mark.unit

TOKENIZER = byte_tokenizer()
BYTES = GrammarCompiler(TOKENIZER.vocabulary.pieces, TOKENIZER.vocabulary.special_ids, [EOS_ID])


def matches(grammar: Grammar, text: str) -> bool:
    matcher, token_ids = BYTES.compile(grammar), TOKENIZER.encode(text)
    return matcher.accept(token_ids) == len(token_ids) and matcher.mask().allows(EOS_ID)


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ("abc", "abc", "ab"),
        ("^ab$", "ab", "^ab$"),
        ("a/b\n|c d", "a/b\n", "a"),
        ("[/]\"'\\\\", "/\"'\\", "/"),
        ("\\d\\w\\s", "1a ", "١a "),
        ("é+", "éé", "e"),
        (".*", "// # %", "a\nb"),
    ],
)
def test_a_regular_expression_matches_the_whole_output(source: str, good: str, bad: str) -> None:
    assert matches(regex(source), good)
    assert not matches(regex(source), bad)
    assert not matches(regex(source), good + "\n\n")


def test_json_may_be_indented_but_not_without_end() -> None:
    grammar = schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    for text in ('{"a":1}', '{"a": 1}', '{\n    "a": 1\n}'):
        assert matches(grammar, text)
    for text in ("{" + " " * 21 + '"a":1}', '{\n\n"a":1}', ' {"a":1}', '{"b":1}', '{"a":1}\n'):
        assert not matches(grammar, text)


@pytest.mark.parametrize("value", [True, {}, {"type": "string", "x-guidance": {"whitespace_flexible": True}}])
def test_any_schema_is_compiled_with_our_own_options(value: object) -> None:
    assert matches(schema(value), '"a/b // %"')
    assert not matches(schema(value), ' "a"')


def test_options_in_a_schema_do_not_make_it_lenient() -> None:
    with pytest.raises(GrammarError, match=r"^Unimplemented keys.*uniqueItems"):
        BYTES.compile(schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}))


@pytest.mark.parametrize("source", ["{", "[1]", "7", "[" * 5000])
def test_what_is_no_schema_is_refused(source: str) -> None:
    with pytest.raises(GrammarError, match="schema"):
        BYTES.compile(Grammar(GrammarKind.JSON_SCHEMA, source))


def test_a_vocabulary_without_an_end_has_masks_too() -> None:
    matcher = GrammarCompiler(PIECES, (), ()).compile(regex("ab"))
    assert matcher.mask().has_next
    assert matcher.accept([PIECES.index(b"ab")]) == 1
    assert not matcher.mask().has_next


def test_a_mask_is_as_wide_as_the_models_vocabulary() -> None:
    mask = GrammarCompiler(PIECES, (), (0,), vocab_size=1000).compile(regex("a+")).mask()
    assert len(mask.bits) == 4 * -(-1000 // 32)
    assert [token_id for token_id in range(1000) if mask.allows(token_id)] == [
        PIECES.index(piece) for piece in (b"a", b"aa", b"aaa")
    ]


def test_guesses_leave_no_trace() -> None:
    guide = GrammarGuide(InstantGrammars().matcher(regex("(ab|c)+x")), {0})
    a, b, c, x = (PIECES.index(piece) for piece in (b"a", b"b", b"c", b"x"))
    before = guide.masks(())
    assert guide.legal_prefix((a, b, c, a, a)) == (a, b, c, a)
    assert guide.legal_prefix((a, c)) == (a,)
    assert guide.legal_prefix((c, x)) == (c,)  # nothing can follow x
    assert guide.legal_prefix((c, 0)) == (c,)  # nor an end
    assert guide.masks(()) == before
    windowed = guide.masks((a, b, c))
    guide.append((a, b))
    assert guide.masks((c,)) == windowed[2 * len(before) :]
    assert not guide.is_complete
    guide.append((x,))
    assert guide.is_complete


def test_committed_tokens_that_do_not_follow_are_an_error() -> None:
    with pytest.raises(GrammarError, match="does not follow"):
        GrammarGuide(InstantGrammars().matcher(regex("ab")), {0}, (PIECES.index(b"b"),))


def test_too_much_work_ahead_does_not_hurt_what_is_committed() -> None:
    """Each character leads to a state of the lexer that is new, until their number is at its limit."""
    matcher = BYTES.compile(regex("(x.*a.{30}){3}|y+"))
    guide = GrammarGuide(matcher, {EOS_ID})
    chars = TOKENIZER.encode("x" + "".join(random.Random(1).choices("ab", k=30_000)))
    legal = guide.legal_prefix(chars)
    assert 100 < len(legal) < len(chars)
    fresh: Matcher = BYTES.compile(regex("(x.*a.{30}){3}|y+"))
    assert guide.masks(()) == fresh.mask().bits
    assert guide.legal_prefix(TOKENIZER.encode("yyy")) == TOKENIZER.encode("yyy")
