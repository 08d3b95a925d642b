"""Where a sequence's output stands in its grammar, and which tokens may come next. Pure: matchers are passed in.

Only committed tokens move a guide. Guesses are looked at and taken back:

    output      | committed .......... | guess 0 | guess 1 | ...
    masks                      masks[0]  masks[1]  masks[2]      of the token after each
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from cluster.core.acceptance import common_prefix_len
from cluster.messages.request import Grammar


class GrammarError(ValueError):
    """A grammar that cannot be used, or an output that does not follow it; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that a grammar allows at one position.

    bits: int32 [ceil(vocab_size / 32)], packed; bit i % 32 of word i // 32 is set if token i may come.
    has_next: whether one of them goes on. If not, nothing but the end of the output is left.
    """

    bits: bytes
    has_next: bool

    def allows(self, token_id: int) -> bool:
        return bool(self.bits[token_id // 8] >> token_id % 8 & 1)


class TokenMatcher(Protocol):
    """Follows one output through a grammar. End-of-sequence tokens are never given to it."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Go on by the tokens up to the first that is not allowed; how many those are."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""
        ...

    def mask(self) -> TokenMask:
        """What may come next. Raises GrammarError when that takes too much work; rollback is the way out."""
        ...


class Grammars(Protocol):
    """An engine's compiled grammars."""

    def find(self, grammar: Grammar) -> TokenMatcher | None:
        """A new matcher at the start of an output; None while the grammar is being compiled. Raises GrammarError."""
        ...


class GrammarGuide:
    """Owns one output's matcher, and the masks after what is committed and after the guesses looked at last."""

    __slots__ = ("_ahead", "_end_token_ids", "_masks", "_matcher")

    def __init__(self, matcher: TokenMatcher, end_token_ids: Set[int], output_token_ids: Sequence[int] = ()) -> None:
        """`output_token_ids`: committed elsewhere. Raises GrammarError if the grammar does not allow them."""
        self._matcher = matcher
        self._end_token_ids = end_token_ids
        self._ahead: list[int] = []
        self._masks: list[TokenMask] = []
        self.append(output_token_ids)

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow what is committed."""
        return not self._masks[0].has_next

    def append(self, token_ids: Sequence[int]) -> None:
        """Take in committed output; a token that ends it may be the last. Raises GrammarError: of no use then."""
        token_ids = [token_id for token_id in token_ids if token_id not in self._end_token_ids]
        if self._matcher.accept(token_ids) < len(token_ids):
            raise GrammarError("the output does not follow the grammar")
        num_known = len(token_ids) if self._ahead[: len(token_ids)] == token_ids else len(self._masks)
        del self._ahead[:num_known], self._masks[:num_known]
        if not self._masks:
            self._masks.append(self._matcher.mask())

    def legal_prefix(self, guesses: Sequence[int]) -> tuple[int, ...]:
        """The guesses up to the first that the grammar does not allow, or that nothing can follow.

        The latter is left to the target's own sample at its place, so there is never a row after the end.
        """
        num_known = common_prefix_len(guesses, self._ahead)
        if num_known < len(guesses):
            self._look_ahead(guesses, num_known)
        return tuple(guesses[: common_prefix_len(guesses, self._ahead)])

    def masks(self, guesses: Sequence[int]) -> bytes:
        """The masks after what is committed and after each of the guesses, end to end. They must be a legal prefix."""
        return b"".join(mask.bits for mask in self._masks_until(guesses))

    def next_mask(self, guesses: Sequence[int]) -> bytes:
        """The mask after the last of the guesses. They must be a legal prefix."""
        return self._masks_until(guesses)[-1].bits

    def _masks_until(self, guesses: Sequence[int]) -> list[TokenMask]:
        if len(self.legal_prefix(guesses)) < len(guesses):
            raise GrammarError("a guess does not follow the grammar")
        return self._masks[: len(guesses) + 1]

    def _look_ahead(self, guesses: Sequence[int], num_known: int) -> None:
        del self._ahead[num_known:], self._masks[num_known + 1 :]
        num_ahead = self._matcher.accept(self._ahead)
        try:
            for token_id in guesses[num_known:]:
                if token_id in self._end_token_ids or not self._matcher.accept((token_id,)):
                    return
                num_ahead += 1
                mask = self._matcher.mask()
                if not mask.has_next:
                    return
                self._ahead.append(token_id)
                self._masks.append(mask)
        except GrammarError:  # a guess led where the target need never go; if it does, its own row will tell
            return
        finally:
            self._matcher.rollback(num_ahead)
