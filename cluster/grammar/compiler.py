"""Grammars to token masks, by llguidance: an Earley parser over lexemes that are matched by derivatives of regexes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from cluster.core.grammar import GrammarError, TokenMask
from cluster.messages.request import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Between two tokens of JSON: enough to indent by, not enough to get lost in.
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"\n?[ \t]{0,20}"}

LIMITS = LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
_MAX_REASON_CHARS = 200
_PLACE = re.compile(r"error: |at \d+\(\d+\): (failed to compile JSON schema: )?")  # in a source that nobody wrote


class _Pieces:
    """A vocabulary as llguidance reads it. Nothing here encodes text."""

    bos_token_id = None

    def __init__(self, pieces: Sequence[bytes], special_ids: Iterable[int], end_token_id: int) -> None:
        self.tokens = list(pieces)
        self.special_token_ids = sorted(special_ids)
        self.eos_token_id = end_token_id

    def __call__(self, text: bytes) -> list[int]:
        return []


class GrammarCompiler:
    """Owns a vocabulary in the form that matching needs. Any thread may compile."""

    def __init__(
        self, pieces: Sequence[bytes], special_ids: Iterable[int], end_token_ids: Iterable[int], vocab_size: int = 0
    ) -> None:
        """`pieces`: the bytes of each token. `vocab_size`: of the model, if that is more."""
        self._end_ids = sorted(end_token_ids)
        special = {*special_ids, *self._end_ids}
        num_tokens = max(len(pieces), vocab_size, *(token_id + 1 for token_id in self._end_ids))
        # llguidance needs an end: where the model has none, a token that it cannot say stands for it.
        ends = self._end_ids or [num_tokens]
        num_tokens = max(num_tokens, ends[-1] + 1)
        padded = [*pieces, *[b""] * (num_tokens - len(pieces))]
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Pieces(padded, special, ends[0])), n_vocab=num_tokens, eos_token=ends
        )
        self._end_bits = sum(1 << token_id for token_id in ends)

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the start of an output, without the GIL meanwhile. Raises GrammarError saying what is wrong."""
        source = _native_source(grammar)

        def start() -> LLMatcher:
            return LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)

        native = start()
        if native.is_error():
            raise GrammarError(_reason(native))
        num_bytes = -(-self._tokenizer.vocab_size // 32) * 4
        matcher = Matcher(CompiledGrammar(native, start, num_bytes, self._end_bits))
        if not matcher.mask().has_next:
            raise GrammarError("it allows no output but an empty one")
        return matcher


@dataclass(slots=True)
class CompiledGrammar:
    """What the matchers of one grammar share: among others, what the lexer has learnt, up to a limit.

    `is_spent`: it may learn no more, so that new matchers had better start anew.
    """

    native: LLMatcher  # at the start of an output, and left there
    start: Callable[[], LLMatcher]
    num_mask_bytes: int
    end_bits: int
    is_spent: bool = False


def _native_source(grammar: Grammar) -> str:
    """A grammar in llguidance's own syntax, a variant of Lark.

    no_forcing: a text that the grammar forces may be cut into tokens as the model likes, so that a mask is exactly the
    set of tokens that may be accepted, whatever the tokenizer makes of that text.
    """
    body = f"/{_lark_regex(grammar.source)}/" if grammar.kind is GrammarKind.REGEX else f"%json {_json(grammar.source)}"
    return LLMatcher.grammar_from_lark(f'%llguidance {{"no_forcing": true}}\nstart: {body}\n')


def _lark_regex(source: str) -> str:
    return regex_to_lark(source, "dws")  # \d, \w and \s are ASCII's


def _json(source: str) -> str:
    """A schema with our own options, whatever options it brings."""
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is no JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError("a schema should be an object")
    fields = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
    return json_source({**fields, "x-guidance": JSON_OPTIONS})


def _reason(native: LLMatcher) -> str:
    """What is wrong, on one short line."""
    if "NoExtension" in native.get_error():
        return "no output follows it"
    lines = [line.strip() for line in native.get_error().splitlines()]
    reason = next((line for line in lines if line.startswith("error: ")), lines[0])  # of a regex; else the only line
    return _PLACE.sub("", reason)[:_MAX_REASON_CHARS]


class Matcher:
    """Owns one output's place in a compiled grammar: a TokenMatcher."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self.compiled = compiled
        self._native = compiled.native.deep_copy()
        self._accepted: list[int] = []

    def copy(self) -> Matcher:
        """One at the start of an output."""
        return Matcher(self.compiled)

    def accept(self, token_ids: Sequence[int]) -> int:
        """See TokenMatcher."""
        num_accepted = self._native.try_consume_tokens(list(token_ids))
        self._accepted += token_ids[:num_accepted]
        return num_accepted

    def rollback(self, num_tokens: int) -> None:
        """See TokenMatcher."""
        if num_tokens == 0:
            return
        del self._accepted[-num_tokens:]
        if self._native.is_error() or not self._native.rollback(num_tokens):
            self._start_anew()

    def mask(self) -> TokenMask:
        """See TokenMatcher."""
        bits = self._native.compute_bitmask()
        if self._native.is_error():  # perhaps because of what others have made the lexer learn
            self._start_anew()
            bits = self._native.compute_bitmask()
        if self._native.is_error():
            raise GrammarError(_reason(self._native))
        has_next = (int.from_bytes(bits, "little") & ~self.compiled.end_bits) != 0
        return TokenMask(bits[: self.compiled.num_mask_bytes], has_next)

    def _start_anew(self) -> None:
        """Go over what is accepted with a lexer that is nobody else's."""
        self.compiled.is_spent = True
        self._native = self.compiled.start()
        self._native.try_consume_tokens(self._accepted)


def json_source(schema: object) -> str:
    """A schema's text, keys in the given order. Raises GrammarError for what JSON cannot say."""
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is no JSON: {error}") from error
