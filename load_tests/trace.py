"""Where a speculative round's time goes: `paceline bench --trace FILE`."""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from cluster.tracing.marks import TRACE_VARIABLE, Place, TraceLog, read_marks
from load_tests.round_trace import Trace, join, median_round
from load_tests.spread import Spread
from load_tests.trace_picture import chrome_trace, svg
from protos.paceline.v1 import inference_pb2 as pb

OnResponse = Callable[[pb.GenerateResponse], None]
_MILLION = 1e6


@contextmanager
def traced_processes() -> Iterator[Path]:
    """Processes that are started inside write their marks into this folder when they end."""
    if "RAY_ADDRESS" in os.environ:
        raise RuntimeError("--trace starts a cluster of its own: unset RAY_ADDRESS")
    with tempfile.TemporaryDirectory(prefix="paceline-trace-") as folder:
        os.environ[TRACE_VARIABLE] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ[TRACE_VARIABLE]


def ask_each(ask: Callable[[Sequence[int], OnResponse], object], prompts: Sequence[Sequence[int]]) -> TraceLog:
    """One prompt after the other; the marks of the client, without those of a first request that warms up."""
    ask(prompts[0], lambda _: None)
    log = TraceLog()

    def received(response: pb.GenerateResponse) -> None:
        log.mark(Place.CLIENT_RECEIVED, response.request_id, 0, len(response.token_ids))

    for token_ids in track(prompts, "tracing", console=Console(stderr=True)):
        ask(token_ids, received)
    return log


def report(folder: Path, client: TraceLog, out: Path, console: Console) -> None:
    """Join what the processes have written with the client's marks, print the table and write the pictures."""
    files = sorted(folder.glob("*.jsonl"))
    measured = {mark.request_id for mark in client.marks()}
    trace = join([*(mark for mark in read_marks(files) if mark.request_id in measured), *client.marks()])
    if not trace.rounds:
        raise RuntimeError(f"no complete round in {[file.name for file in files]}: {dict(trace.left_out)}")
    console.print(table(trace))
    console.print(f"left out: {dict(trace.left_out) or 'none'}")
    out.with_suffix(".json").write_text(json.dumps(chrome_trace(trace.rounds)))
    out.with_suffix(".svg").write_text(svg(median_round(trace.rounds)))
    console.print(f"{out.with_suffix('.json')} opens in ui.perfetto.dev; {out.with_suffix('.svg')} is the median round")


def table(trace: Trace) -> Table:
    """Milliseconds per part of a round, and what the models leave of it."""
    result = Table("part of a round", "ms, median [P10, P90]", title=f"{len(trace.rounds)} rounds, 1 stream")
    parts: dict[str, list[float]] = defaultdict(list)
    for item in trace.rounds:
        for name, ns in item.by_name().items():
            parts[name].append(ns / _MILLION)
    for name, values in parts.items():
        some = "" if len(values) == len(trace.rounds) else f" (in {len(values)} rounds)"
        result.add_row(name + some, str(Spread.of(values)))
    result.add_section()
    result.add_row("the round", str(Spread.of([item.duration_ns / _MILLION for item in trace.rounds])))
    result.add_row("share outside both models", str(Spread.of([item.outside_forwards for item in trace.rounds])))
    if trace.answers:
        result.add_section()
        result.add_row("commit → text for the proxy", str(Spread.of([a.router_ns / _MILLION for a in trace.answers])))
        result.add_row("→ read by the client", str(Spread.of([a.proxy_ns / _MILLION for a in trace.answers])))
    return result
