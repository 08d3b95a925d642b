"""What several commands share: the consoles, the options, and the ways to fail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import httpx
import typer
from rich.console import Console

from cluster.config import ClusterConfig, ConfigError, load_config

console = Console()
errors = Console(stderr=True)

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="Configuration file; default: the demo.")]
UrlOption = Annotated[str, typer.Option("--url", help="Base URL of a running Paceline.")]
DEFAULT_URL = "http://127.0.0.1:8000"


def load(path: Path | None) -> ClusterConfig:
    """The configuration; ends the command if it cannot be used."""
    try:
        return load_config(path)
    except ConfigError as error:
        die(str(error))


def get(url: str) -> httpx.Response:
    """A good answer of a running Paceline; ends the command if there is none."""
    try:
        return httpx.get(url, timeout=10).raise_for_status()
    except httpx.HTTPError as error:
        die(f"no Paceline answers at {url}: {error}")


def write(text: str) -> None:
    """Text as it comes, without a line end."""
    sys.stdout.write(text)
    sys.stdout.flush()


def die(message: str) -> NoReturn:
    """End the command with a message."""
    errors.print(f"[red]error:[/red] {message}", highlight=False, soft_wrap=True)
    raise typer.Exit(1)
