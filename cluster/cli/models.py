"""`paceline models …`."""

from __future__ import annotations

import typer
from rich.table import Table

from cluster.cli.common import console, print_table
from cluster.cli.fetching import resolve

models_app = typer.Typer(no_args_is_help=True, help="Fetch and list models.")


@models_app.command("fetch")
def models_fetch(name: str) -> None:
    """Download and convert a known model into the cache."""
    console.print(str(resolve(name)), soft_wrap=True)


@models_app.command("list")
def models_list() -> None:
    """Known models and where they are."""
    from cluster.runtime.model_store import known_models

    table = Table("name", "state", "path")
    for item in known_models():
        table.add_row(item.name, "ready" if item.path else "not fetched", str(item.path or ""))
    print_table(table)
