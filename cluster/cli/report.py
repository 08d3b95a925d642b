"""`paceline report`: what finished requests were like, by whom they came from and what they followed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from cluster.cli.admin import call
from cluster.cli.client import DEFAULT_URL, UrlOption
from cluster.cli.common import console, print_table
from cluster.control.breakdown import Window
from cluster.control.dimensions import Dimension
from cluster.control.report import DEFAULT_BY

MAX_POSITIONS = 8  # shown; --json has all of them

_WINDOWS = ", ".join(window.label for window in Window)
_DIMENSIONS = ", ".join(Dimension)

Figure = Callable[[Any], str]


def report(
    by: Annotated[str, typer.Option(help=f"Separated by commas: {_DIMENSIONS}.")] = ",".join(DEFAULT_BY),
    window: Annotated[str, typer.Option(help=f"{_WINDOWS}.")] = Window.TEN_MINUTES.label,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Latencies, errors and acceptance of requests, canaries beside controls, and where speculation does not pay."""
    answer = call("GET", url, "report", window=window, by=by)
    if as_json:
        console.print_json(json.dumps(answer))
        return
    console.print(_title(answer))
    if not answer["rows"]:
        return
    print_table(_rows(answer))
    if answer["comparisons"]:
        print_table(_comparisons(answer))
    for line in _explanations(answer):
        console.print(line, soft_wrap=True)


def _title(answer: dict[str, Any]) -> str:
    since = datetime.fromtimestamp(answer["started_at"]).strftime("%H:%M:%S")
    left_out = f"; {answer['left_out']} rarer groups are left out" if answer["left_out"] else ""
    return f"{answer['requests']} requests finished since {since}{left_out}"


def _rows(answer: dict[str, Any]) -> Table:
    figures: dict[str, Figure] = {
        "requests": lambda row: str(row["requests"]),
        "errors": lambda row: f"{row['error_rate']:.1%}",
        "fell back": lambda row: f"{row['fallback_rate']:.1%}",
        "TTFT p50, p95": lambda row: _pair(_ms, row["ttft_p50_s"], row["ttft_p95_s"]),
        "TPOT p50, p95": lambda row: _pair(_ms, row["tpot_p50_s"], row["tpot_p95_s"]),
        "ITL p95, p99": lambda row: _pair(_ms, row["itl_p95_s"], row["itl_p99_s"]),
        "acc. length": lambda row: _number(row["acceptance_length"]),
        "accepted by position": lambda row: _positions(row["accepted_per_position"]),
    }
    return _table(answer["by"], figures, answer["rows"], "times in ms")


def _comparisons(answer: dict[str, Any]) -> Table:
    names = [*(name for name in answer["by"] if name != Dimension.VARIANT), "canary"]
    figures: dict[str, Figure] = {
        "TTFT p50, p95": lambda row: _pair(_number, row["ttft_p50"], row["ttft_p95"]),
        "TPOT p50, p95": lambda row: _pair(_number, row["tpot_p50"], row["tpot_p95"]),
        "ITL p95, p99": lambda row: _pair(_number, row["itl_p95"], row["itl_p99"]),
        "acc. length": lambda row: _number(row["acceptance_length"]),
    }
    rows = [row | {"values": [*row["values"], row["variant"]]} for row in answer["comparisons"]]
    return _table(names, figures, rows, "canary / control")


def _table(names: list[str], figures: dict[str, Figure], rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    for name in names:
        table.add_column(name.replace("_", " "))
    for name in figures:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row["values"], *(figure(row) for figure in figures.values()))
    return table


def _explanations(answer: dict[str, Any]) -> Iterator[str]:
    """Of every group for which speculation does not pay."""
    for row in answer["rows"]:
        if row["explanation"]:
            group = ", ".join(f"{name} {value}" for name, value in zip(answer["by"], row["values"], strict=True))
            yield f"speculation does not pay for {group or 'these requests'}: {row['explanation']}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _pair(figure: Callable[[float | None], str], first: float | None, second: float | None) -> str:
    return "" if first is None and second is None else f"{figure(first) or '-'}, {figure(second) or '-'}"


def _positions(shares: list[float]) -> str:
    return " ".join(f"{share:.2f}" for share in shares[:MAX_POSITIONS]) + (" …" if len(shares) > MAX_POSITIONS else "")
