"""What a window's requests were like, as a table: a row for each group, and each canary beside its control. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from cluster.control.breakdown import Breakdown, Group, Selection, Window
from cluster.control.cell import Cell
from cluster.control.dimensions import NONE, Dimension
from cluster.control.document import CONTROL, DEFAULT, OFF
from cluster.control.top_names import OTHER
from cluster.control.verdict import break_even, why_not

MAX_ROWS: Final = 500  # the busiest; the rest are left out and counted
DEFAULT_BY: Final = (Dimension.MODEL, Dimension.VARIANT)
_NO_CANARIES: Final = frozenset({CONTROL, DEFAULT, OFF, NONE, OTHER})


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One group. None where it has no such value; times in seconds, rates as shares of its requests.

    itl_p95_s, itl_p99_s: of a typical request: the median over requests of each one's own quantile.
    accepted_per_position: of the guesses verified at a position of their block, the share that was accepted.
    break_even: the acceptance length from which on speculation pays. explanation: why it does not.
    """

    values: tuple[str, ...]  # in the order of the report's dimensions
    requests: int
    error_rate: float
    fallback_rate: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    tpot_p95_s: float | None
    itl_p95_s: float | None
    itl_p99_s: float | None
    acceptance_length: float | None
    accepted_per_position: tuple[float, ...]
    break_even: float | None
    explanation: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A canary's figures divided by its control's. None where one has no such value, or the control's is 0.

    values: of the report's dimensions, without the variant.
    """

    values: tuple[str, ...]
    variant: str
    ttft_p50: float | None
    ttft_p95: float | None
    tpot_p50: float | None
    tpot_p95: float | None
    itl_p95: float | None
    itl_p99: float | None
    acceptance_length: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """The busiest groups first. Times are seconds since 1970."""

    window: str
    started_at: float
    ended_at: float
    by: tuple[Dimension, ...]
    requests: int
    rows: tuple[ReportRow, ...]
    comparisons: tuple[Comparison, ...] = ()
    left_out: int = 0  # groups beyond MAX_ROWS


def report(breakdown: Breakdown, window: Window, by: tuple[Dimension, ...]) -> Report:
    """What the window holds, by distinct dimensions."""
    selection = breakdown.select(window, by)
    busiest = sorted(selection.groups.items(), key=lambda item: (-item[1].all.requests, item[0]))
    rows = {values: _row(values, group, selection) for values, group in busiest[:MAX_ROWS]}
    return Report(
        window.label,
        selection.started_at,
        selection.ended_at,
        by,
        sum(group.all.requests for group in selection.groups.values()),
        tuple(rows.values()),
        tuple(_comparisons(rows, by.index(Dimension.VARIANT))) if Dimension.VARIANT in by else (),
        len(busiest) - len(rows),
    )


def _row(values: tuple[str, ...], group: Group, selection: Selection) -> ReportRow:
    cell, plain = group.all, _plain(group, selection)
    return ReportRow(
        values,
        cell.requests,
        cell.failed / cell.requests,
        cell.fell_back / cell.requests,
        cell.ttft.quantile(0.5),
        cell.ttft.quantile(0.95),
        cell.tpot.quantile(0.5),
        cell.tpot.quantile(0.95),
        cell.itl_p95.quantile(0.5),
        cell.itl_p99.quantile(0.5),
        cell.acceptance_length,
        tuple(accepted / verified for accepted, verified in zip(cell.accepted, cell.verified, strict=True) if verified),
        None if plain is None else break_even(group.speculating, plain),
        why_not(group.speculating, plain),
    )


def _plain(group: Group, selection: Selection) -> Cell | None:
    """What the group's speculation is compared with: only requests of the same model tell."""
    return selection.plain.get(next(iter(group.models))) if len(group.models) == 1 else None


def _comparisons(rows: dict[tuple[str, ...], ReportRow], place: int) -> Iterator[Comparison]:
    for values, canary in rows.items():
        control = rows.get((*values[:place], CONTROL, *values[place + 1 :]))
        if control is not None and values[place] not in _NO_CANARIES:
            yield _compare(values[:place] + values[place + 1 :], values[place], canary, control)


def _compare(values: tuple[str, ...], variant: str, canary: ReportRow, control: ReportRow) -> Comparison:
    def ratio(figure: Callable[[ReportRow], float | None]) -> float | None:
        mine, other = figure(canary), figure(control)
        return None if mine is None or not other else mine / other

    return Comparison(
        values,
        variant,
        ratio(lambda row: row.ttft_p50_s),
        ratio(lambda row: row.ttft_p95_s),
        ratio(lambda row: row.tpot_p50_s),
        ratio(lambda row: row.tpot_p95_s),
        ratio(lambda row: row.itl_p95_s),
        ratio(lambda row: row.itl_p99_s),
        ratio(lambda row: row.acceptance_length),
    )
