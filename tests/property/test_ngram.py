"""The n-gram index against the plainest possible search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.ngram import MAX_CANDIDATES, NgramIndex

pytestmark = pytest.mark.property


def search(tokens: list[int], min_match: int, max_match: int, num_tokens: int) -> tuple[int, ...]:
    """Longest earlier occurrence of a suffix, the latest among equals, repeated with its own period."""
    for length in range(min(max_match, len(tokens) - 1), min_match - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                period = len(tokens) - end
                return tuple(tokens[end + offset % period] for offset in range(num_tokens))
    return ()


@given(
    tokens=st.lists(st.integers(0, 3), max_size=MAX_CANDIDATES),
    cut=st.integers(0, MAX_CANDIDATES),
    min_match=st.integers(1, 4),
    extra=st.integers(0, 4),
    num_tokens=st.integers(1, 8),
)
def test_it_finds_what_a_search_finds(tokens: list[int], cut: int, min_match: int, extra: int, num_tokens: int) -> None:
    index = NgramIndex(tokens[:cut], min_match, min_match + extra)
    index.extend(tokens[cut:])
    assert index.guess(num_tokens) == search(tokens, min_match, min_match + extra, num_tokens)
    assert len(index) == len(tokens)
