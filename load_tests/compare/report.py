"""What a comparison found, as a table for the terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from load_tests.compare.figures import Spread, agreement, ratios, spread_of
from load_tests.compare.measure import Results
from load_tests.compare.peers.base import Arm, PeerName
from load_tests.compare.scenario import Load, Scenario

FIGURES: Mapping[str, str] = {
    "tok_s": "tok/s",
    "decode_tok_s": "1/TPOT",
    "ttft_ms": "TTFT ms",
    "tpot_ms": "TPOT ms",
    "itl_p50_ms": "ITL P50 ms",
    "itl_p95_ms": "ITL P95 ms",
    "itl_p99_ms": "ITL P99 ms",
    "peak_rss_mib": "peak RSS MiB",
    "pss_mib": "PSS MiB",
    "engine_cores": "cores used",
    "others_share": "others' share",
}
RATIOS: Mapping[str, str] = {"tok_s": "tok/s", "decode_tok_s": "1/TPOT", "ttft_ms": "TTFT"}


@dataclass(frozen=True, slots=True)
class Report:
    """A finished comparison and what it was made on."""

    scenario: Scenario
    results: Results
    machine: str
    conditions: str

    def arms(self, load: Load) -> list[Arm]:
        """Those with figures for `load`."""
        return [arm for arm in self.scenario.arms if (arm, load) in self.results.rounds]

    def spread(self, arm: Arm, load: Load, figure: str) -> Spread | None:
        return spread_of(self.results.rounds[arm, load], figure)

    def pairs(self, load: Load) -> Iterator[tuple[Arm, Arm]]:
        """Each way of running Paceline, and each of running something else."""
        arms = self.arms(load)
        ours = [arm for arm in arms if arm.peer is PeerName.PACELINE]
        yield from ((our, other) for our in ours for other in arms if other.peer is not PeerName.PACELINE)

    def ratio(self, our: Arm, other: Arm, load: Load, figure: str) -> Spread | None:
        """Round by round."""
        return ratios(self.results.rounds[our, load], self.results.rounds[other, load], figure)

    def agreement(self, arm: Arm) -> str:
        """With the first arm's texts of the same prompts: how many are the same, and how far the median one is."""
        texts, first = self.results.texts, self.scenario.arms[0]
        pairs = [
            (text, texts[first, prompt])
            for (one, prompt), text in texts.items()
            if one == arm and (first, prompt) in texts
        ]
        if not pairs:
            return "–"
        shares = [agreement(*pair) for pair in pairs]
        return f"{shares.count(1.0)}/{len(shares)}, {statistics.median(shares):.0%}"


def tables(report: Report) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """(title, columns, rows) of each table."""
    for load in report.scenario.loads:
        columns = ["engine", *FIGURES.values(), "same text, up to"]
        rows = [[str(arm), *_cells(report, arm, load), report.agreement(arm)] for arm in report.arms(load)]
        yield f"{load}, {load.max_tokens} tokens", columns, rows
        compared = [
            [f"{our} / {other}", *(_cell(report.ratio(our, other, load, figure)) for figure in RATIOS)]
            for our, other in report.pairs(load)
        ]
        if compared:
            yield f"{load}: ratios, round by round", ["engines", *RATIOS.values()], compared
    if report.results.notes:
        yield "Notes", ["engine", "runs"], [[str(arm), note] for arm, note in report.results.notes.items()]
    if report.results.absent:
        yield "Absent", ["engine", "reason"], [[str(arm), reason] for arm, reason in report.results.absent.items()]


def _cells(report: Report, arm: Arm, load: Load) -> list[str]:
    return [_cell(report.spread(arm, load, figure)) for figure in FIGURES]


def _cell(spread: Spread | None) -> str:
    return "–" if spread is None else str(spread)


def rich_tables(report: Report) -> Iterator[Table]:
    """For the terminal."""
    for title, columns, rows in tables(report):
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(column)
        for row in rows:
            table.add_row(*(cell.replace(" [", "\n[") for cell in row))
        yield table


def markdown(report: Report) -> str:
    """A page: what was measured on what, then the tables."""
    parts = [f"# {report.scenario.title}", f"{report.conditions}. {report.machine}.", _LEGEND]
    for title, columns, rows in tables(report):
        lines = [columns, ["---"] * len(columns), *rows]
        parts += [f"## {title}", "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)]
    return "\n\n".join(parts) + "\n"


_LEGEND = (
    "Medians over rounds, with the lowest and the highest in brackets. tok/s counts all streams' output from the first "
    "request to the last token; 1/TPOT is one stream's rate after its first token. RSS counts pages that processes "
    "share once for each, PSS once in all. Others' share is what neither engine nor clients took of the cores' time: a "
    "machine that nobody else uses shows next to nothing there. Same text: how many of the texts equal those of the "
    "first engine, and the share of the median one before it differs."
)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def as_json(report: Report) -> str:
    """Every round of every engine."""
    results = report.results
    measured: list[dict[str, Any]] = [
        {"engine": str(arm), "load": str(load), "rounds": [asdict(figures) for figures in rounds]}
        for (arm, load), rounds in results.rounds.items()
    ]
    absent = {str(arm): reason for arm, reason in results.absent.items()}
    notes = {str(arm): note for arm, note in results.notes.items()}
    head = {"title": report.scenario.title, "machine": report.machine, "conditions": report.conditions}
    return json.dumps({**head, "measured": measured, "absent": absent, "notes": notes}, indent=1)
