"""`paceline audit`."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from cluster.cli.admin import call
from cluster.cli.client import DEFAULT_URL, UrlOption
from cluster.cli.common import console, moment, print_table


def audit(
    url: UrlOption = DEFAULT_URL,
    limit: Annotated[int, typer.Option(min=1, max=100)] = 20,
    before: Annotated[int | None, typer.Option(min=1, help="Entries before this one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Who changed what, when and why; newest first."""
    entries = call("GET", url, "audit", limit=limit, before=before)
    if as_json:
        console.print_json(json.dumps(entries))
        return
    table = Table("entry", "time", "who", "did", "to", "came to", "why")
    for entry in entries:
        what = entry["actor"], entry["action"], entry["target"], entry["outcome"], entry["detail"]
        table.add_row(str(entry["sequence"]), moment(entry["at"]), *what)
    print_table(table)
