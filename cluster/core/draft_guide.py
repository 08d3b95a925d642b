"""A draft session's grammar: guesses that it forbids are not made, as far as it is known."""

from __future__ import annotations

from collections.abc import Sequence, Set

from cluster.core.grammar import GrammarError, GrammarGuide, Grammars
from cluster.messages.request import Grammar


class DraftGuide:
    """Owns one session's guide from when its grammar is compiled on. Until then, and without one, guesses are free.

    Nothing here fails a session: the target rejects what its own guide does not allow.
    """

    __slots__ = ("_end_token_ids", "_grammar", "_grammars", "_guide")

    def __init__(self, grammars: Grammars, grammar: Grammar, end_token_ids: Set[int]) -> None:
        self._grammars: Grammars | None = grammars  # None: the grammar is of no use
        self._grammar = grammar
        self._end_token_ids = end_token_ids
        self._guide: GrammarGuide | None = None

    def append(self, token_ids: Sequence[int]) -> None:
        """Take in committed output."""
        if self._guide is None:
            return
        try:
            self._guide.append(token_ids)
        except GrammarError:
            self._guide = self._grammars = None

    def next_mask(self, output_token_ids: Sequence[int], guesses: Sequence[int]) -> bytes | None:
        """What may follow the guesses, as a TokenMask's bits. None: anything."""
        if self._guide is None:
            self._guide = self._start(output_token_ids)
        if self._guide is None or self.ends_with(guesses):
            return None
        return self._guide.next_mask(guesses)

    def ends_with(self, guesses: Sequence[int]) -> bool:
        """Whether nothing may follow the guesses."""
        return self._guide is not None and len(self._guide.legal_prefix(guesses)) < len(guesses)

    def _start(self, output_token_ids: Sequence[int]) -> GrammarGuide | None:
        if self._grammars is None:
            return None
        try:
            matcher = self._grammars.find(self._grammar)
            return None if matcher is None else GrammarGuide(matcher, self._end_token_ids, output_token_ids)
        except GrammarError:
            self._grammars = None
            return None


def draft_guide(grammars: Grammars | None, grammar: Grammar | None, end_token_ids: Set[int]) -> DraftGuide | None:
    """None for a request without a grammar, or where none can be compiled."""
    return None if grammars is None or grammar is None else DraftGuide(grammars, grammar, end_token_ids)
