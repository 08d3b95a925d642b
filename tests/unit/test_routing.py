"""Which replica a request goes to."""

from __future__ import annotations

from collections import Counter

import pytest

from cluster.core.routing import Candidate, filter_ready, pick
from cluster.messages.rounds import PoolLoad

pytestmark = pytest.mark.unit


def load(running: int = 0, waiting: int = 0, free: int = 100, draining: bool = False) -> PoolLoad:
    return PoolLoad(running, waiting, free, 100, 0, draining)


def test_the_least_loaded_replica_wins() -> None:
    candidates = [Candidate("a", 0, load(3, 2)), Candidate("b", 0, load(3, 1)), Candidate("c", 0, load(5, 0))]
    assert pick(candidates, "r") == "b"


def test_requests_that_no_report_covers_yet_count() -> None:
    assert pick([Candidate("a", 5, load()), Candidate("b", 0, load(2, 0))], "r") == "b"


def test_among_equals_free_kv_decides() -> None:
    assert pick([Candidate("a", 0, load(1, 0, free=10)), Candidate("b", 0, load(1, 0, free=90))], "r") == "b"


def test_a_replica_without_a_report_counts_as_empty() -> None:
    assert pick([Candidate("a", 0, load(1)), Candidate("b")], "r") == "b"


def test_full_equals_are_spread_by_request() -> None:
    candidates = [Candidate(name) for name in "abcd"]
    counts = Counter(pick(candidates, f"request-{number}") for number in range(400))
    assert min(counts[name] for name in "abcd") > 50


def test_draining_and_excluded_replicas_are_left_out() -> None:
    candidates = [Candidate("a", 0, load(draining=True)), Candidate("b"), Candidate("c")]
    assert [candidate.key for candidate in filter_ready(candidates, {"b"})] == ["c"]
    assert pick(candidates, "r", {"b", "c"}) is None


def test_a_replica_without_kv_blocks_can_be_scored() -> None:
    assert pick([Candidate("a", 0, PoolLoad(0, 0, 0, 0, 0))], "r") == "a"
