"""A breakdown of finished requests: counts add up, quantiles are within their error, and memory has a bound."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.breakdown import MAX_CELLS, Breakdown, Window
from cluster.control.cell import Cell
from cluster.control.dimensions import MAX_NAMES, Dimension, output_range, prompt_range, temperature_range
from cluster.control.finished_request import FinishedRequest, FollowedPolicy, Outcome, RequestGuesses, RequestTimes
from cluster.control.log_histogram import RELATIVE_ERROR
from cluster.control.top_names import OTHER
from cluster.messages.request import Drafter

pytestmark = pytest.mark.property

NOW = 1_000_000.0
TIMES = st.none() | st.floats(1e-3, 100)
POSITIONS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=4)


@st.composite
def guesses(draw: st.DrawFn) -> RequestGuesses:
    positions = draw(POSITIONS)
    drafter = draw(st.sampled_from([Drafter.MODEL, Drafter.NGRAM])) if positions else Drafter.NONE
    verified, accepted = (tuple(column) for column in zip(*positions, strict=True)) if positions else ((), ())
    length = draw(st.none() | st.sampled_from([1.0, 1.5, 4.0]))
    return RequestGuesses(drafter, draw(st.none() | st.just("d1")), draw(st.booleans()), length, verified, accepted)


REQUESTS = st.builds(
    FinishedRequest,
    request_id=st.just("r"),
    finished_at=st.floats(NOW - 8000, NOW + 10),
    model=st.sampled_from(["m", "n"]),
    tenant=st.sampled_from(["a", "b", "c"]),
    workload=st.sampled_from(["chat", "code"]),
    outcome=st.sampled_from(Outcome),
    temperature=st.floats(0, 2),
    prompt_tokens=st.integers(0, 10_000),
    output_tokens=st.sampled_from([0, 12, 60, 3000]),
    policy=st.none() | st.builds(FollowedPolicy, st.just(1), st.just(1), st.sampled_from(["canary", "control"])),
    times=st.builds(RequestTimes, TIMES, TIMES, TIMES, TIMES),
    guesses=guesses(),
)
LISTS = st.lists(REQUESTS, max_size=30)
DIMENSIONS = st.lists(st.sampled_from(Dimension), unique=True).map(tuple)


def cell_of(*lists: list[FinishedRequest]) -> Cell:
    cell = Cell()
    for request in (request for requests in lists for request in requests):
        cell.add(request)
    return cell


def merged(*cells: Cell) -> Cell:
    total = Cell()
    for cell in cells:
        total.merge(cell)
    return total


def figures(cell: Cell) -> tuple[object, ...]:
    times = (cell.ttft, cell.tpot, cell.itl_p95, cell.itl_p99)
    quantiles = tuple((part.total, *map(part.quantile, (0.0, 0.5, 0.95, 1.0))) for part in times)
    counts = (cell.requests, cell.failed, cell.fell_back, cell.output_tokens, cell.num_steps)
    return (*counts, cell.verified, cell.accepted, quantiles)


@given(LISTS, LISTS, LISTS)
def test_merging_cells_is_associative_commutative_and_the_same_as_adding(
    a: list[FinishedRequest], b: list[FinishedRequest], c: list[FinishedRequest]
) -> None:
    cells = [cell_of(a), cell_of(b), cell_of(c)]
    left = merged(merged(cells[0], cells[1]), cells[2])
    right = merged(cells[0], merged(cells[1], cells[2]))
    assert figures(left) == figures(right) == figures(merged(*reversed(cells))) == figures(cell_of(a, b, c))


@given(st.lists(REQUESTS.filter(lambda r: r.times.ttft_s is not None), min_size=1, max_size=60), st.floats(0, 1))
def test_a_cells_quantiles_are_within_the_stated_error(requests: list[FinishedRequest], share: float) -> None:
    exact = sorted(request.times.ttft_s or 0.0 for request in requests)[max(1, math.ceil(share * len(requests))) - 1]
    found = cell_of(requests).ttft.quantile(share)
    assert found == pytest.approx(exact, rel=RELATIVE_ERROR * 1.0001)


@given(LISTS, DIMENSIONS, st.sampled_from(Window))
def test_every_request_of_a_window_is_in_one_group_and_the_groups_add_up(
    requests: list[FinishedRequest], by: tuple[Dimension, ...], window: Window
) -> None:
    breakdown = Breakdown(lambda: NOW)
    breakdown.add(requests)
    selection = breakdown.select(window, by)
    inside = [request for request in requests if request.finished_at >= selection.started_at]
    assert figures(merged(*(group.all for group in selection.groups.values()))) == figures(cell_of(inside))
    assert 0 <= NOW - selection.started_at - window.slice_s * window.num_slices <= window.slice_s
    parts = [*selection.plain.values(), *(group.speculating for group in selection.groups.values())]
    assert figures(merged(*parts)) == figures(cell_of(inside))
    for values, group in selection.groups.items():
        assert dict(zip(by, values, strict=True)).get(Dimension.MODEL, "m") in {"m", "n"}
        assert group.models <= {"m", "n"}


@given(st.lists(st.tuples(REQUESTS, st.floats(0, 400)), max_size=30), st.floats(0, 5000))
def test_what_has_left_a_window_is_gone_and_nothing_else(
    arrivals: list[tuple[FinishedRequest, float]], silence_s: float
) -> None:
    now, shown = NOW, []
    breakdown = Breakdown(lambda: now)
    for request, pause_s in arrivals:
        now += pause_s
        shown.append(replace(request, finished_at=now))
        breakdown.add([shown[-1]])
    now += silence_s
    for window in Window:
        selection = breakdown.select(window, ())
        inside = [request for request in shown if request.finished_at >= selection.started_at]
        assert figures(merged(*(group.all for group in selection.groups.values()))) == figures(cell_of(inside))


def hostile_requests(count: int) -> Iterator[FinishedRequest]:
    random = Random(0)
    for i in range(count):
        yield FinishedRequest(
            f"r{i}",
            NOW - 3 * random.random(),
            f"model-{i % 60}",
            f"tenant-{i}",
            f"workload-{i}",
            Outcome.STOP,
            random.choice([0.0, 0.3, 0.7, 1.5]),
            random.randrange(20_000),
            random.randrange(4_000),
            FollowedPolicy(1, 1, f"variant-{i}"),
            RequestTimes(random.random()),
            RequestGuesses(Drafter.MODEL, f"draft-{i}", verified_per_position=(1,), accepted_per_position=(1,)),
        )


def test_ten_thousand_hostile_names_stay_bounded_and_are_all_counted() -> None:
    breakdown = Breakdown(lambda: NOW)
    breakdown.add(hostile_requests(10_000))
    for window in Window:
        selection = breakdown.select(window, tuple(Dimension))
        assert len(selection.groups) <= 2 * MAX_CELLS  # of two slices at most
        assert sum(group.all.requests for group in selection.groups.values()) == 10_000
    for dimension, limit in MAX_NAMES.items():
        values = {value for (value,) in breakdown.select(Window.HOUR, (dimension,)).groups}
        assert OTHER in values
        assert len(values) <= limit + 1


def test_a_busy_tenant_keeps_its_name_and_its_variant_among_strangers() -> None:
    breakdown = Breakdown(lambda: NOW)
    for stranger in hostile_requests(3_000):
        acme = replace(stranger, model="m", tenant="acme", policy=FollowedPolicy(1, 1, "canary"))
        breakdown.add([stranger, acme])
    groups = breakdown.select(Window.HOUR, (Dimension.TENANT, Dimension.VARIANT)).groups
    assert groups["acme", "canary"].all.requests > 2_900


def test_ranges_have_every_number_once() -> None:
    assert [temperature_range(t) for t in (0.0, 0.01, 0.5, 0.51, 1.0, 2.0)] == [
        "0", "0-0.5", "0-0.5", "0.5-1", "0.5-1", "1-2",
    ]  # fmt: skip
    assert [prompt_range(n) for n in (0, 128, 129, 8192, 8193)] == ["0-128", "0-128", "129-512", "2049-8192", "8193+"]
    assert [output_range(n) for n in (0, 1, 32, 33, 2048, 2049)] == ["0", "1-32", "1-32", "33-128", "513-2048", "2049+"]
