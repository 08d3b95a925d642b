"""`paceline policy …` and `paceline access …` against a running cluster: what is in force, and its history."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cluster.cli.admin import ReasonOption, author, call
from cluster.cli.client import DEFAULT_URL, UrlOption
from cluster.cli.common import console, die, moment, print_table, write
from cluster.control.store import MAX_TEXT_BYTES
from cluster.control.text_diff import unified_diff

FileArgument = Annotated[Path, typer.Argument(help="YAML or JSON; - reads standard input.")]
VersionArgument = Annotated[int, typer.Argument(min=0, help="0: what holds before the first document.")]


def add_document_commands(app: typer.Typer, kind: str) -> None:
    """get, apply, diff, history and rollback of one kind of document."""

    @app.command("get")
    def get(
        url: UrlOption = DEFAULT_URL,
        version: Annotated[int | None, typer.Option(min=0, help="Default: the one in force.")] = None,
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
        diff = unified_diff(current["text"], read_text(file), f"version {current['info']['version']}", str(file))
        write(diff + "\n" * bool(diff))

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
                when = moment(info["written_at"])
                line = f"version {info['version']}, {when}, {info['author']}: {info['reason']}"
                console.print(line, style="bold", soft_wrap=True)
                write(info["diff"] + "\n")
        else:
            print_table(_history_table(versions))

    @app.command("rollback")
    def rollback(version: VersionArgument, url: UrlOption = DEFAULT_URL, reason: ReasonOption = "") -> None:
        """Put an earlier version in force again, as a new version."""
        body = {"version": version, "author": author(), "reason": reason}
        print_in_force(call("POST", url, f"{kind}/rollback", body))


def read_text(file: Path) -> str:
    """The text of a file, or of standard input for `-`; ends the command if it cannot be a document."""
    try:
        with sys.stdin.buffer if str(file) == "-" else file.open("rb") as stream:
            data = stream.read(MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            die(f"{file}: a document has at most {MAX_TEXT_BYTES} bytes")
        return data.decode()
    except OSError as error:
        die(f"cannot read {file}: {error.strerror}")
    except UnicodeDecodeError as error:
        die(f"{file}: byte {error.start} is not UTF-8")


def print_in_force(answer: dict[str, Any]) -> None:
    """Say what has just been put in force."""
    info = answer["info"]
    console.print(f"{info['kind']} version {info['version']} is in force")


def _history_table(versions: list[dict[str, Any]]) -> Table:
    table = Table("version", "time", "author", "reason")
    for info in versions:
        restores = "" if info["restores"] is None else f"rollback to {info['restores']}. "
        table.add_row(str(info["version"]), moment(info["written_at"]), info["author"], restores + info["reason"])
    return table
