"""Grammars over small vocabularies, compiled at once."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.core.grammar import GrammarError
from cluster.grammar.compiler import GrammarCompiler, Matcher
from cluster.messages.request import Grammar, GrammarKind
from tests.engines import EOS

# Token 0 ends an output. Some are one character, some are several, and some are the same text as others together.
PIECES = (
    b"", *(bytes([char]) for char in b"abcxyz0123456789,.:-_ {}[]\"'\n"),
    b"ab", b"abc", b"aa", b"aaa", b"bb", b"xy", b"12", b"00", b"1,", b",1", b'{"', b'":', b'"}', b"a,", b"[1", b"]]",
)  # fmt: skip


def regex(source: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, source)


class InstantGrammars:
    """An engine's grammars, without a thread. `delay`: how often each is not ready yet when it is asked for."""

    def __init__(self, pieces: Sequence[bytes] = PIECES, delay: int = 0) -> None:
        self.on_ready = lambda: None
        self._compiler = GrammarCompiler(pieces, (), EOS)
        self._compiled: dict[Grammar, Matcher] = {}
        self._delay = delay
        self._num_asked: dict[Grammar, int] = {}

    def find(self, grammar: Grammar) -> Matcher | None:
        self._num_asked[grammar] = self._num_asked.get(grammar, 0) + 1
        if self._num_asked[grammar] <= self._delay:
            return None
        if grammar not in self._compiled:
            self._compiled[grammar] = self._compiler.compile(grammar)
        return self._compiled[grammar].copy()

    def matcher(self, grammar: Grammar) -> Matcher:
        return self._compiler.compile(grammar)

    def is_usable(self, grammar: Grammar) -> bool:
        try:
            self.matcher(grammar)
        except GrammarError:
            return False
        return True


def text_of(token_ids: Sequence[int]) -> str:
    return b"".join(PIECES[token_id] for token_id in token_ids).decode()
