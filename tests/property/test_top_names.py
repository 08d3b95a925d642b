"""Names that are told apart: few, the busy ones, and each for good."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.top_names import OTHER, TopNames

pytestmark = pytest.mark.property

STREAMS = st.lists(st.integers(0, 40).map(str), max_size=400)


@given(STREAMS, st.integers(1, 8))
def test_names_are_few_and_kept(stream: list[str], limit: int) -> None:
    names = TopNames(limit)
    given_names: set[str] = set()
    for name in stream:
        called = names.see(name)
        assert called in (name, OTHER)
        assert called == names(name)
        given_names |= {called} - {OTHER}
        assert all(names(known) == known for known in given_names)
    assert len(given_names) <= limit
    assert given_names.issuperset(list(dict.fromkeys(stream))[: (limit + 1) // 2])


def flooded(limit: int, num_strangers: int) -> TopNames:
    names = TopNames(limit)
    for number in range(num_strangers):
        names.see(f"stranger-{number}")
    return names


@given(st.integers(2, 20), st.integers(1, 9))
def test_a_busy_name_gets_a_place_after_any_flood_of_strangers(limit: int, busy: int) -> None:
    names = flooded(limit, 3000)
    num_names = min(busy, limit // 2)
    for number in range(3000):  # half of the traffic, shared evenly
        names.see(f"busy-{number % num_names}")
        names.see(f"late-stranger-{number}")
    for number in range(num_names):
        assert names(f"busy-{number}") == f"busy-{number}"


def test_strangers_take_the_first_half_of_the_places_only() -> None:
    names = flooded(20, 10_000)
    assert sum(names(f"stranger-{number}") != OTHER for number in range(10_000)) == 10


def test_others_requests_do_not_count_for_a_name() -> None:
    names = flooded(20, 4_000)
    for _ in range(60):  # 1.5 % of all, and half of 1/20 is 2.5 %
        assert names.see("late") == OTHER


def test_nobody_is_turned_away_while_there_are_places_for_first_comers() -> None:
    names = TopNames(6)
    assert [names.see(name) for name in "abcabcd"] == ["a", "b", "c", "a", "b", "c", OTHER]
    assert names("never seen") == OTHER


def test_it_forgets_who_is_rare() -> None:
    names = flooded(20, 10_000)
    assert len(names._candidates) <= 80
