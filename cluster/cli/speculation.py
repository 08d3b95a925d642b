"""`paceline speculation on|off`: the switch for everyone, a model, a tenant, a draft version, or a share of traffic."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cluster.cli.admin import ReasonOption, author, call
from cluster.cli.client import DEFAULT_URL, UrlOption
from cluster.cli.documents import print_in_force

speculation_app = typer.Typer(no_args_is_help=True, help="Turn speculation on and off, running streams included.")

ModelOption = Annotated[str | None, typer.Option(help="Only for this model.")]
TenantOption = Annotated[str | None, typer.Option(help="Only for this tenant.")]
DraftVersionOption = Annotated[str | None, typer.Option(help="Only with drafts of this version.")]


@speculation_app.command("off")
def speculation_off(
    model: ModelOption = None,
    tenant: TenantOption = None,
    draft_version: DraftVersionOption = None,
    url: UrlOption = DEFAULT_URL,
    reason: ReasonOption = "",
) -> None:
    """Off at once, for running streams too; their text stays the same."""
    _switch(url, reason, {"enabled": False, "model": model, "tenant": tenant, "draft_version": draft_version})


@speculation_app.command("on")
def speculation_on(
    model: ModelOption = None,
    tenant: TenantOption = None,
    draft_version: DraftVersionOption = None,
    percent: Annotated[float | None, typer.Option(min=0, max=100, help="Off for the rest.")] = None,
    url: UrlOption = DEFAULT_URL,
    reason: ReasonOption = "",
) -> None:
    """On, for all of them or for a share that only grows as the percentage does."""
    names = {"model": model, "tenant": tenant, "draft_version": draft_version}
    _switch(url, reason, {"enabled": True, "percent": percent, **names})


def _switch(url: str, reason: str, switch: dict[str, Any]) -> None:
    body = {name: value for name, value in switch.items() if value is not None}
    print_in_force(call("POST", url, "speculation", body | {"author": author(), "reason": reason}))
