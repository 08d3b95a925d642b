"""`paceline policy …` and `paceline access …` against a running cluster: what is in force, and its history."""

from __future__ import annotations

import difflib
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cluster.cli.admin import ReasonOption, author, call
from cluster.cli.common import DEFAULT_URL, UrlOption, console, die, write
from cluster.control.store import MAX_TEXT_BYTES

FileArgument = Annotated[Path, typer.Argument(help="YAML or JSON; - reads standard input.")]


def add_document_commands(app: typer.Typer, kind: str) -> None:
    """get, apply, diff, history and rollback of one kind of document."""

    @app.command("get")
    def get(
        url: UrlOption = DEFAULT_URL,
        version: Annotated[int | None, typer.Option(min=1, help="Default: the one in force.")] = None,
    ) -> None:
        """Print the document."""
        path = kind if version is None else f"{kind}/versions/{version}"
        write(call("GET", url, path)["text"])

    @app.command("apply")
    def apply(
        file: FileArgument,
        url: UrlOption = DEFAULT_URL,
        reason: ReasonOption = "",
        expected_version: Annotated[int | None, typer.Option(min=0, help="Refuse if another one stands.")] = None,
    ) -> None:
        """Put a document in force."""
        body = {"text": read_text(file), "author": author(), "reason": reason, "expected_version": expected_version}
        print_in_force(call("PUT", url, kind, body))

    @app.command("diff")
    def diff(file: FileArgument, url: UrlOption = DEFAULT_URL) -> None:
        """How a document differs from the one in force."""
        current = call("GET", url, kind)
        before, after = current["text"].splitlines(True), read_text(file).splitlines(True)
        write("".join(difflib.unified_diff(before, after, f"version {current['info']['version']}", str(file))))

    @app.command("history")
    def history(
        url: UrlOption = DEFAULT_URL,
        limit: Annotated[int, typer.Option(min=1, max=100)] = 20,
        before: Annotated[int | None, typer.Option(min=1, help="Versions before this one.")] = None,
        diffs: Annotated[bool, typer.Option("--diff", help="Show what each changed.")] = False,
    ) -> None:
        """Who put what in force, when and why; newest first."""
        versions = call("GET", url, f"{kind}/versions", limit=limit, before=before)
        if diffs:
            for info in versions:
                console.print(
                    f"version {info['version']}, {_when(info)}, {info['author']}: {info['reason']}", style="bold"
                )
                write(info["diff"] + "\n")
        else:
            console.print(_history_table(versions))

    @app.command("rollback")
    def rollback(version: int, url: UrlOption = DEFAULT_URL, reason: ReasonOption = "") -> None:
        """Put an earlier version in force again, as a new version."""
        body = {"version": version, "author": author(), "reason": reason}
        print_in_force(call("POST", url, f"{kind}/rollback", body))


def read_text(file: Path) -> str:
    """The file's text; ends the command if it cannot be one."""
    try:
        if str(file) == "-":
            return sys.stdin.read(MAX_TEXT_BYTES + 1)
        with file.open("rb") as stream:
            return stream.read(MAX_TEXT_BYTES + 1).decode()
    except OSError as error:
        die(f"cannot read {file}: {error.strerror}")
    except UnicodeDecodeError as error:
        die(f"{file}: byte {error.start} is not UTF-8")


def print_in_force(answer: dict[str, Any]) -> None:
    """Say what has just been put in force."""
    info = answer["info"]
    console.print(f"{info['kind']} version {info['version']} is in force", highlight=False)


def _history_table(versions: list[dict[str, Any]]) -> Table:
    table = Table("version", "time", "author", "reason")
    for info in versions:
        restores = "" if info["restores"] is None else f"rollback to {info['restores']}. "
        table.add_row(str(info["version"]), _when(info), info["author"], restores + info["reason"])
    return table


def _when(info: dict[str, Any]) -> str:
    return datetime.fromtimestamp(info["written_at"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
