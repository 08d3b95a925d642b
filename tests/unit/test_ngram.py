"""What the n-gram drafter guesses."""

from __future__ import annotations

import pytest

from cluster.core.ngram import NgramIndex

pytestmark = pytest.mark.unit


def test_it_guesses_what_followed_the_same_tokens_before() -> None:
    assert NgramIndex([7, 1, 2, 3, 4, 5, 9, 1, 2], 2, 5).guess(3) == (3, 4, 5)


def test_nothing_is_guessed_below_the_shortest_match() -> None:
    assert NgramIndex([1, 2, 3, 9, 3], 2, 5).guess(3) == ()
    assert NgramIndex([1, 2, 3, 9, 3], 1, 5).guess(1) == (9,)


def test_the_longest_match_wins_over_a_later_one() -> None:
    assert NgramIndex([5, 1, 2, 8, 0, 1, 2, 9, 5, 1, 2], 2, 5).guess(1) == (8,)


def test_among_equally_long_matches_the_latest_wins() -> None:
    assert NgramIndex([1, 2, 8, 0, 1, 2, 9, 4, 1, 2], 2, 5).guess(1) == (9,)


def test_matches_longer_than_the_longest_allowed_count_as_equal() -> None:
    assert NgramIndex([5, 1, 2, 8, 0, 1, 2, 9, 5, 1, 2], 2, 2).guess(1) == (9,)


def test_a_match_that_reaches_the_end_repeats() -> None:
    assert NgramIndex([4, 1, 2, 1, 2], 2, 5).guess(5) == (1, 2, 1, 2, 1)


def test_short_texts_guess_nothing() -> None:
    assert NgramIndex([], 2, 5).guess(4) == ()
    assert NgramIndex([1], 2, 5).guess(4) == ()
    assert NgramIndex([1, 1], 2, 5).guess(4) == ()


def test_bounds_must_be_in_order() -> None:
    with pytest.raises(ValueError, match="min_match"):
        NgramIndex([], 3, 2)
