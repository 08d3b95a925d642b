"""`paceline status`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from cluster.cli.client import DEFAULT_URL, UrlOption, ask
from cluster.cli.common import console, print_table


def status(url: UrlOption = DEFAULT_URL, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Pools, replicas, KV use, and acceptance length of a running Paceline."""
    report = ask("GET", f"{url}/status")
    if as_json:
        console.print_json(json.dumps(report))
        return
    table = Table("model", "pool", "version", "replica", "running", "waiting", "KV used", "KV peak", "state")
    for replica in report["replicas"]:
        table.add_row(*_replica_row(replica))
    print_table(table)
    for item in report["models"]:
        console.print(
            f"{item['model']}: {item['num_requests']} requests in flight, "
            f"acceptance length {item['acceptance_length']:.2f} over {item['num_steps']} target steps"
        )


def _replica_row(replica: dict[str, Any]) -> list[str]:
    name = [replica["model"], replica["pool"], replica["version"] or "", replica["replica_id"][:12]]
    load = replica["load"]
    if load is None:
        return [*name, "", "", "", "", "connecting"]
    total = load["num_total_blocks"]
    used = total - load["num_free_blocks"]
    return [
        *name,
        str(load["num_running"]),
        str(load["num_waiting"]),
        f"{used}/{total} ({used / total:.0%})",
        f"{load['peak_used_blocks'] / total:.0%}",
        "draining" if load["draining"] else "ready",
    ]
