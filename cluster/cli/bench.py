"""`paceline bench`."""

from __future__ import annotations

import typer


def bench(context: typer.Context) -> None:
    """Measure this machine: TPOT against transformers, time per round, speculation on and off (see --help)."""
    from load_tests.bench import app as bench_app

    bench_app(context.args, prog_name="paceline bench")
