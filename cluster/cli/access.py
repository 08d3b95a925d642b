"""`paceline access …`, `paceline keys …`, `paceline quota`: the access document of a running cluster."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Annotated, Any

import httpx
import typer
import yaml
from rich.table import Table

from cluster.cli.admin import ReasonOption, author, call
from cluster.cli.client import DEFAULT_URL, UrlOption
from cluster.cli.common import console, die, print_table
from cluster.cli.documents import add_document_commands, print_in_force
from cluster.control.access import KEY_PREFIX, AccessDocument, Limits, key_digest, parse_access
from cluster.control.document import DocumentError

access_app = typer.Typer(no_args_is_help=True, help="The document of API keys and quotas, as a whole.")
keys_app = typer.Typer(no_args_is_help=True, help="API keys. With the first one, every request needs one.")

add_document_commands(access_app, "access")

Values = dict[str, Any]

MAX_TRIES = 5
EVERYONE_ELSE = "everyone else"


@keys_app.command("create")
def keys_create(label: str, tenant: str, url: UrlOption = DEFAULT_URL, reason: ReasonOption = "") -> None:
    """Make a key for a tenant and print it; it is shown this once and kept nowhere."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    entry = {"label": label, "tenant": tenant, "sha256": key_digest(key)}

    def added(values: Values) -> Values:
        return values | {"keys": [*values.get("keys", []), entry]}

    _change(url, added, reason or f"key {label} for {tenant}")
    console.print(key, soft_wrap=True)


@keys_app.command("revoke")
def keys_revoke(
    label: str,
    url: UrlOption = DEFAULT_URL,
    reason: ReasonOption = "",
    last: Annotated[bool, typer.Option("--last", help="Even the last one: nobody is asked for a key then.")] = False,
) -> None:
    """Make a key worthless for every request that comes from now on."""

    def removed(values: Values) -> Values:
        keys = values.get("keys", [])
        left = [key for key in keys if key["label"] != label]
        if len(left) == len(keys):
            die(f"there is no key {label!r}")
        if not left and not last:
            die("that is the last key, and without any, nobody is asked for one: create another, or say --last")
        return values | {"keys": left}

    _change(url, removed, reason or f"revoke key {label}")


@keys_app.command("list")
def keys_list(url: UrlOption = DEFAULT_URL) -> None:
    """Labels and tenants."""
    table = Table("label", "tenant", "sha256")
    for key in _current(url)[0].get("keys", []):
        table.add_row(key["label"], key["tenant"], key["sha256"][:12] + "…")
    print_table(table)


def quota(
    tenant: Annotated[str | None, typer.Option(help="Default: every tenant that has none of its own.")] = None,
    requests_per_minute: Annotated[float | None, typer.Option(help="Absent: not limited.")] = None,
    tokens_per_minute: Annotated[float | None, typer.Option(help="Prompt and output; absent: not limited.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Absent: not limited.")] = None,
    unlimited: Annotated[bool, typer.Option("--unlimited", help="Take all three limits away.")] = False,
    url: UrlOption = DEFAULT_URL,
    reason: ReasonOption = "",
) -> None:
    """Set a tenant's quota, all three limits at once; without any, show what there is."""
    given = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
    }
    limits = {name: value for name, value in given.items() if value is not None}
    if limits and unlimited:
        die("--unlimited goes with no limit")
    if not limits and not unlimited:
        _show_quotas(_current(url)[0].get("quotas", {}), tenant)
        return

    def limited(values: Values) -> Values:
        quotas: Values = values.get("quotas", {})
        changed = {"default": limits} if tenant is None else {"tenants": quotas.get("tenants", {}) | {tenant: limits}}
        return values | {"quotas": quotas | changed}

    _change(url, limited, reason or f"quota of {tenant or EVERYONE_ELSE}")


def _show_quotas(quotas: Values, tenant: str | None) -> None:
    """One tenant's, or everybody's."""
    tenants: Values = quotas.get("tenants", {})
    others: Values = quotas.get("default", {})
    shown: Values = tenants | {EVERYONE_ELSE: others} if tenant is None else {tenant: tenants.get(tenant, others)}
    table = Table("tenant", *(name.replace("_", " ") for name in Limits.model_fields))
    for name, limits in shown.items():
        table.add_row(name, *(f"{limits[field]:.15g}" if field in limits else "" for field in Limits.model_fields))
    print_table(table)


def _current(url: str) -> tuple[Values, int]:
    """The access document's values and its version."""
    answer = call("GET", url, "access")
    return _values(parse_access(answer["text"])), answer["info"]["version"]


def _values(document: AccessDocument) -> Values:
    values: Values = document.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return values


def _change(url: str, change: Callable[[Values], Values], reason: str) -> None:
    """Change the document that stands, whichever that is by now."""
    for _ in range(MAX_TRIES):
        values, version = _current(url)
        try:
            document = parse_access(change(values))
        except DocumentError as error:
            die(str(error))
        text = yaml.safe_dump(_values(document), sort_keys=False)
        body = {"text": text, "author": author(), "reason": reason, "expected_version": version}
        answer = call("PUT", url, "access", body, tolerated=[httpx.codes.CONFLICT])
        if answer is not None:
            print_in_force(answer)
            return
    die(f"others were first {MAX_TRIES} times: try again")
