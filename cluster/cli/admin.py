"""Calls of the admin API, for the commands that administer."""

from __future__ import annotations

import getpass
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.cli.client import ask
from cluster.cli.common import die
from cluster.transport.admin_token import ADMIN_TOKEN_VARIABLE, configured_token

TIMEOUT_S = 30.0

ReasonOption = Annotated[str, typer.Option("--reason", "-m", help="Kept in the history.")]


def token_file() -> Path:
    """Where `paceline serve` keeps the token that it has made, for commands of the same user."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "paceline" / "admin-token"


def ensure_token() -> Path | None:
    """Set the environment's admin token for a cluster about to start: its own, else this user's, made if need be.

    Gives the file that has it; None if it came from the environment.
    """
    if _configured():
        return None
    path = token_file()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.touch(mode=0o600)
        fresh.write_text(secrets.token_urlsafe(32))
        fresh.replace(path)
    os.environ[ADMIN_TOKEN_VARIABLE] = path.read_text().strip()
    return path


def author() -> str:
    """Who is changing things, for the history."""
    return getpass.getuser()


def call(
    method: str, url: str, path: str, body: dict[str, Any] | None = None, tolerated: Collection[int] = (), **params: Any
) -> Any:
    """One call of the admin API at a base URL; its answer. Ends the command with the server's message if it fails.

    None says that it failed with one of the `tolerated` statuses.
    """
    query = {name: value for name, value in params.items() if value is not None}
    return ask(method, f"{url}/admin/v1/{path}", _token(), TIMEOUT_S, tolerated, json=body, params=query)


def _configured() -> str | None:
    """The environment's token; ends the command for one that cannot be used."""
    try:
        return configured_token(os.environ)
    except ValueError as error:
        die(str(error))


def _token() -> str:
    token = _configured()
    if token:
        return token
    try:
        return token_file().read_text().strip()
    except OSError:
        die(f"no admin token: set {ADMIN_TOKEN_VARIABLE}")
