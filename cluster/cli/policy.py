"""`paceline policy …`: what policy documents say, and the one that a running cluster follows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cluster.cli.admin import call
from cluster.cli.client import DEFAULT_URL, UrlOption
from cluster.cli.common import console, die, errors, print_table
from cluster.cli.documents import FileArgument, add_document_commands, read_text
from cluster.cli.policy_report import as_json, as_text
from cluster.control.applicable import check_applicable
from cluster.control.document import DocumentError, PolicyDocument, parse_document
from cluster.control.explain import explain
from cluster.control.policy import PolicyContext, SpeculationPolicy
from cluster.messages.request import MAX_DRAFT_TOKENS, Drafter, SpeculationOverride

policy_app = typer.Typer(no_args_is_help=True, help="Who speculates: check, explain, apply, watch and roll back.")
add_document_commands(policy_app, "policy")

FileOption = Annotated[Path | None, typer.Option("--file", "-f", help="Default: the document in force at --url.")]


@policy_app.command("check")
def policy_check(file: FileArgument) -> None:
    """Say whether a policy document would be accepted, else every flaw with the path to its field."""
    document = _read(file)
    try:
        check_applicable(document)
    except DocumentError as error:
        die(f"{file}: {error}")
    console.print(f"{file}: {len(document.rules)} rules, digest {document.digest()}", soft_wrap=True)


@policy_app.command("explain")
def policy_explain(
    file: FileOption = None,
    url: UrlOption = DEFAULT_URL,
    model: Annotated[str, typer.Option(help="Served model.")] = "",
    tenant: str = "default",
    workload: str = "default",
    user: Annotated[str | None, typer.Option(help="As in the request's `user`.")] = None,
    session: str | None = None,
    request_id: Annotated[str, typer.Option(help="Stands in where the targeting key is missing.")] = "",
    key_label: Annotated[str | None, typer.Option(help="Label of the API key.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 1.0,
    prompt_tokens: Annotated[int, typer.Option(min=0)] = 0,
    draft_version: str | None = None,
    draft_ready: Annotated[bool, typer.Option(help="Whether a draft replica is ready.")] = True,
    asks_enabled: Annotated[bool | None, typer.Option("--asks-on/--asks-off", help="The request's own wish.")] = None,
    asks_drafter: Annotated[Drafter | None, typer.Option(help="The request's own wish.")] = None,
    asks_max_draft_tokens: Annotated[int | None, typer.Option(min=1, max=MAX_DRAFT_TOKENS)] = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say what a policy document decides for a request: its bucket, each rule, matched or why not, and the decision."""
    context = PolicyContext(
        model,
        tenant,
        workload,
        request_id,
        user,
        session,
        key_label,
        temperature,
        prompt_tokens,
        draft_version,
        SpeculationOverride(asks_enabled, asks_max_draft_tokens, asks_drafter),
        frozenset({Drafter.NGRAM, Drafter.MODEL} if draft_ready else {Drafter.NGRAM}),
    )
    _check_text(model, tenant, workload, request_id, user, session, key_label, draft_version)
    explanation = explain(_policy(file, url), context)
    if json:
        console.print_json(as_json(explanation))
    else:
        console.print(as_text(explanation), soft_wrap=True)


@policy_app.command("status")
def policy_status(url: UrlOption = DEFAULT_URL) -> None:
    """Which router runs which version."""
    answer = call("GET", url, "status")
    console.print(f"in force: policy {answer['policy_version']}, access {answer['access_version']}")
    if answer["store_error"]:
        console.print(f"the store does not answer: {answer['store_error']}", style="red")
    table = Table("router", "policy", "access", "refused")
    for router in answer["routers"]:
        versions = str(router["policy_version"]), str(router["access_version"])
        table.add_row(router["router_id"][:12], *versions, router["error"])
    print_table(table)


def _policy(file: Path | None, url: str) -> SpeculationPolicy:
    """A file's, as version 0, or the one in force."""
    if file is not None:
        return SpeculationPolicy.of(_read(file), 0)
    answer = call("GET", url, "policy")
    return SpeculationPolicy.of(parse_document(answer["text"]), answer["info"]["version"])


def _check_text(*values: str | None) -> None:
    """A shell may pass bytes that are no text; no request can."""
    for value in values:
        try:
            (value or "").encode()
        except UnicodeEncodeError:
            die(f"{value!a} is not Unicode text")


def _read(file: Path) -> PolicyDocument:
    """Ends the command with every flaw of a document that cannot be used."""
    try:
        return parse_document(read_text(file))
    except DocumentError as error:
        for flaw in error.flaws:
            errors.print(f"{file}: {flaw}", soft_wrap=True)
        raise typer.Exit(1) from error
