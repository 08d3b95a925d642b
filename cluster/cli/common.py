"""What several commands share: the consoles, the options, and the ways to fail."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from cluster.config import ClusterConfig, ConfigError, load_config

# What is printed has names and reasons that others chose: never as markup.
console = Console(markup=False, highlight=False, emoji=False)
errors = Console(stderr=True, markup=False, highlight=False, emoji=False)

MAX_TABLE_WIDTH = 4000

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="Configuration file; default: the demo.")]


def load(path: Path | None) -> ClusterConfig:
    """The configuration; ends the command if it cannot be used."""
    try:
        return load_config(path)
    except ConfigError as error:
        die(str(error))


def print_table(table: Table) -> None:
    """As wide as it is: one that is squeezed into a narrow terminal, or a file, says nothing."""
    width = Measurement.get(console, console.options.update(max_width=MAX_TABLE_WIDTH), table).maximum
    Console(width=max(width, console.width), markup=False, highlight=False, emoji=False).print(table)


def write(text: str) -> None:
    """Text as it comes, without a line end."""
    sys.stdout.write(text)
    sys.stdout.flush()


def die(message: str) -> NoReturn:
    """End the command with a message."""
    errors.print(Text("error:", "red"), message, soft_wrap=True)
    raise typer.Exit(1)


def moment(at: float) -> str:
    """A Unix time, for people."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
