"""The n-gram drafter: guesses that what followed these tokens before will follow them again. No model, no RPC."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

MAX_CANDIDATES = 64  # earlier places compared per guess, so that one guess costs the same on any text


class NgramIndex:
    """Owns one request's tokens and, for each position, the previous place where the same few tokens stood.

        tokens     ... a b c x y z ... a b c
                           ^ match           ^ end: guess x y z

    Every position is chained to the last one that ends with the same `min_match` tokens; a guess walks that chain and
    takes the longest match, the latest among equals. Adding a token costs one dict update.
    """

    def __init__(self, token_ids: Sequence[int], min_match: int, max_match: int) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"need 1 <= min_match <= max_match, got {min_match} and {max_match}")
        self._min_match = min_match
        self._max_match = max_match
        self._token_ids: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # the last min_match tokens → end of their latest place
        self._earlier: list[int | None] = []  # per token: end of the previous place with the same last tokens
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append committed tokens."""
        tokens, width = self._token_ids, self._min_match
        num_known = len(tokens)
        tokens.extend(token_ids)
        first_end = max(num_known + 1, width)  # the first new position with `width` tokens before it
        self._earlier.extend([None] * (min(first_end - 1, len(tokens)) - num_known))
        shifted = [tokens[first_end - width + offset :] for offset in range(width)]
        for end, key in enumerate(zip(*shifted, strict=False), first_end):
            self._earlier.append(self._latest.get(key))
            self._latest[key] = end

    def guess(self, num_tokens: int) -> tuple[int, ...]:
        """The num_tokens tokens that followed the longest earlier match of the current end; empty: no match.

        A match that reaches into its own continuation repeats with that period, as in `a b a b a` → `b a b a …`.
        """
        start = self._match_end()
        if start is None:
            return ()
        period = len(self._token_ids) - start
        return tuple(self._token_ids[start + offset % period] for offset in range(num_tokens))

    def _match_end(self) -> int | None:
        best_end, best_len = None, self._min_match - 1
        for end in islice(self._candidates(), MAX_CANDIDATES):
            match_len = self._match_len(end)
            if match_len > best_len:
                best_end, best_len = end, match_len
            if best_len == self._max_match:
                break
        return best_end

    def _candidates(self) -> Iterable[int]:
        end = self._earlier[-1] if self._earlier else None
        while end is not None:
            yield end
            end = self._earlier[end - 1]

    def _match_len(self, end: int) -> int:
        length = 0
        while length < min(self._max_match, end) and self._token_ids[end - 1 - length] == self._token_ids[-1 - length]:
            length += 1
        return length
