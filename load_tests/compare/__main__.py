"""Compare Paceline with other engines on this machine.

    python -m load_tests.compare PRESET [--peers paceline,llama.cpp] [--rounds 5] [--out FOLDER]

The same requests, weights, cores and threads for everybody; engines take turns. Other engines are installed on first
use. docs/benchmarks.md says what is compared and by which rules.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.cli.fetching import resolve
from cluster.runtime.model_store import cache_dir
from cluster.tokenizer import Tokenizer
from load_tests.compare.measure import Results, measured, start_once
from load_tests.compare.peers.base import Arm, Conditions, PeerName
from load_tests.compare.peers.registry import PEERS
from load_tests.compare.plots import write_plots
from load_tests.compare.report import Report, as_json, markdown, rich_tables
from load_tests.compare.scenario import SCENARIOS, Scenario
from load_tests.compare.workload import Poisson
from load_tests.machine import machine_facts
from load_tests.prompts import heldout_prompts

MODEL, DRAFT = "smollm2-135m", "smollm2-135m-draft"
Preset = StrEnum("Preset", {name.replace("-", "_"): name for name in SCENARIOS})  # type: ignore[misc]

_SAID_EVERY_S = 30.0
_PAGE_WIDTH = 200

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def compare(
    preset: Annotated[Preset, typer.Argument(help="What is compared.")],
    peers: Annotated[str, typer.Option(help="Engines, or rows such as 'llama.cpp bf16'; commas between.")] = ",".join(
        PeerName
    ),
    rounds: Annotated[int | None, typer.Option(min=1, help="Default: the preset's, 5 or more.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Per request; default: the preset's.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.01, help="Poisson arrivals, per second, for the streams.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of each engine; default: one per core.")] = None,
    cores: Annotated[
        str | None, typer.Option(help="Of this machine, such as 0,1; default: all that we may use.")
    ] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, max=32, help="Most guesses at a time, for other engines.")] = 4,
    prepare_only: Annotated[
        bool, typer.Option("--prepare-only", help="Make environments, start every server once, and stop.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="A folder for report.md, report.json and plots.")] = None,
) -> None:
    """Run a preset and print, or write, what it found."""
    scenario = _chosen(SCENARIOS[preset], peers, rounds, max_tokens, rate)
    used = _pin(cores)
    conditions = Conditions(
        model=resolve(MODEL),
        draft=resolve(DRAFT),
        cache=cache_dir() / "peers",
        cores=used,
        threads=threads or len(used),
        max_model_len=scenario.max_model_len,
        max_streams=scenario.max_streams,
        max_draft_tokens=draft_tokens,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Reasons are what other programs wrote: never as markup.
    errors, machine = Console(stderr=True, markup=False), machine_facts()
    console = Console(width=None if sys.stdout.isatty() else _PAGE_WIDTH, markup=False)
    with errors.status("preparing") as status:
        say = status.update if errors.is_terminal else _SaidOnce(errors)
        if prepare_only:
            for arm, reason in start_once(scenario, conditions, PEERS, say).items():
                console.print(f"{arm}: absent: {reason}")
            return
        with measured(scenario, conditions, PEERS, _heldout(conditions.model), say) as results:
            report = Report(scenario, results, machine, _said(conditions, results))
            for table in rich_tables(report):
                console.print(table)
            if out is not None:
                _write(report, out, errors)
            say("stopping the servers")


class _SaidOnce:
    """Where there is no terminal, a line per thing that goes on, and another when it takes long."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ""
        self._when = 0.0

    def __call__(self, line: str) -> None:
        what = line.partition(",")[0]
        now = time.monotonic()
        if what != self._last or now - self._when > _SAID_EVERY_S:
            self._console.print(line, highlight=False, soft_wrap=True)
            self._last, self._when = what, now


def _chosen(scenario: Scenario, peers: str, rounds: int | None, max_tokens: int | None, rate: float | None) -> Scenario:
    loads = scenario.loads
    if max_tokens is not None:
        loads = tuple(replace(load, max_tokens=max_tokens) for load in loads)
    if rate is not None:
        loads = tuple(replace(load, arrivals=Poisson(rate)) for load in loads)
    return replace(scenario, arms=named(scenario.arms, peers), loads=loads, rounds=rounds or scenario.rounds)


def named(arms: Sequence[Arm], peers: str) -> tuple[Arm, ...]:
    """Those that are named by their engine or by their row, and any engine that the preset does not have is ignored."""
    names = {name.strip() for name in peers.split(",")}
    if unknown := names - set(PeerName) - set(map(str, arms)):
        known = ", ".join((*PeerName, *map(str, arms)))
        raise typer.BadParameter(f"{sorted(unknown)} are not of {known}", param_hint="--peers")
    return tuple(arm for arm in arms if arm.peer in names or str(arm) in names)


def _pin(cores: str | None) -> tuple[int, ...]:
    """Keep this program, and every server that it will start, on the given cores. Returns them."""
    if cores is not None:
        try:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        except (ValueError, OSError) as error:
            raise typer.BadParameter(
                f"{cores!r} are not cores of this machine: {error}", param_hint="--cores"
            ) from error
    return tuple(sorted(os.sched_getaffinity(0)))


def _heldout(model: Path) -> tuple[tuple[int, ...], ...]:
    tokenizer = Tokenizer.load(model)
    return tuple(tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) for prompt in heldout_prompts())


def _said(conditions: Conditions, results: Results) -> str:
    cores = ", ".join(map(str, conditions.cores))
    rounds = max(map(len, results.rounds.values()), default=0)
    return (
        f"{MODEL}, greedy, end of sequence ignored, {conditions.threads} threads on cores {cores} (clients included), "
        f"{rounds} rounds"
    )


def _write(report: Report, folder: Path, errors: Console) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(markdown(report))
    (folder / "report.json").write_text(as_json(report))
    try:
        write_plots(report, folder)
    except ImportError:
        errors.print("No plots: they need matplotlib (pip install 'paceline[plots]').")


if __name__ == "__main__":
    app()
