"""`paceline access …`, `paceline keys …`, `paceline quota`: the access document of a running cluster."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import typer
import yaml
from rich.table import Table

from cluster.cli.admin import ReasonOption, author, call
from cluster.cli.client import DEFAULT_URL, UrlOption
from cluster.cli.common import console, die
from cluster.cli.documents import add_document_commands, print_in_force
from cluster.control.access import KEY_PREFIX, AccessDocument, key_digest, parse_access
from cluster.control.document import DocumentError

access_app = typer.Typer(no_args_is_help=True, help="The document of API keys and quotas, as a whole.")
keys_app = typer.Typer(no_args_is_help=True, help="API keys. With the first one, every request needs one.")

add_document_commands(access_app, "access")

Values = dict[str, Any]


@keys_app.command("create")
def keys_create(label: str, tenant: str, url: UrlOption = DEFAULT_URL, reason: ReasonOption = "") -> None:
    """Make a key for a tenant and print it; it is shown this once and kept nowhere."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    values, version = _current(url)
    entry = {"label": label, "tenant": tenant, "sha256": key_digest(key)}
    _apply(url, values | {"keys": [*values.get("keys", []), entry]}, version, reason or f"key {label} for {tenant}")
    console.print(key, soft_wrap=True)


@keys_app.command("revoke")
def keys_revoke(label: str, url: UrlOption = DEFAULT_URL, reason: ReasonOption = "") -> None:
    """Make a key worthless, at once."""
    values, version = _current(url)
    left = [key for key in values.get("keys", []) if key["label"] != label]
    if len(left) == len(values.get("keys", [])):
        die(f"there is no key {label!r}")
    if not left:
        console.print("That was the last key: requests need none now.", style="yellow")
    _apply(url, values | {"keys": left}, version, reason or f"revoke key {label}")


@keys_app.command("list")
def keys_list(url: UrlOption = DEFAULT_URL) -> None:
    """Labels and tenants."""
    table = Table("label", "tenant", "sha256")
    for key in _current(url)[0].get("keys", []):
        table.add_row(key["label"], key["tenant"], key["sha256"][:12] + "…")
    console.print(table)


def quota(
    tenant: Annotated[str | None, typer.Option(help="Default: every tenant that has none of its own.")] = None,
    requests_per_minute: Annotated[float | None, typer.Option(help="Absent: not limited.")] = None,
    tokens_per_minute: Annotated[float | None, typer.Option(help="Prompt and output; absent: not limited.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Absent: not limited.")] = None,
    url: UrlOption = DEFAULT_URL,
    reason: ReasonOption = "",
) -> None:
    """Set a tenant's quota, all three limits at once."""
    values, version = _current(url)
    given = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
    }
    limits = {name: value for name, value in given.items() if value is not None}
    quotas: Values = values.get("quotas", {})
    changed = {"default": limits} if tenant is None else {"tenants": quotas.get("tenants", {}) | {tenant: limits}}
    _apply(url, values | {"quotas": quotas | changed}, version, reason or f"quota of {tenant or 'everyone else'}")


def _current(url: str) -> tuple[Values, int]:
    """The access document's values and its version."""
    answer = call("GET", url, "access")
    document = parse_access(answer["text"])
    return _values(document), answer["info"]["version"]


def _values(document: AccessDocument) -> Values:
    values: Values = document.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return values


def _apply(url: str, values: Values, version: int, reason: str) -> None:
    try:
        document = parse_access(values)
    except DocumentError as error:
        die(str(error))
    text = yaml.safe_dump(_values(document), sort_keys=False)
    body = {"text": text, "author": author(), "reason": reason, "expected_version": version}
    print_in_force(call("PUT", url, "access", body))
