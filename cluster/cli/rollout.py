"""`paceline rollout …`: raise a rule's percentage step by step, and watch it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import yaml
from rich.table import Table

from cluster.cli.admin import ReasonOption, author, call
from cluster.cli.client import DEFAULT_URL, UrlOption
from cluster.cli.common import console, die, errors, moment, print_table
from cluster.cli.documents import read_text
from cluster.control.document import DocumentError
from cluster.control.rollout import FINISHED, RolloutCommand
from cluster.control.rollout_spec import SCHEMA, RolloutSpec, Step, parse_rollout

rollout_app = typer.Typer(no_args_is_help=True, help="Raise a rule's percentage step by step, or take it back.")

WATCH_S = 1.0
_AWAY = (httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)  # what a router says of control


def _rollout_id(text: str) -> str:
    """One that can be part of a path. Ends the command for one that cannot be a rollout's."""
    if not (text.isascii() and text.isalnum()):
        die(f"there is no rollout {text!r}")
    return text


IdArgument = Annotated[str, typer.Argument(callback=_rollout_id, help="As `start` and `list` print it.")]


@rollout_app.command("start")
def start(
    file: Annotated[Path | None, typer.Argument(help="YAML or JSON; - reads standard input.")] = None,
    rule: Annotated[str | None, typer.Option(help="Without a file: the policy's rule to raise.")] = None,
    percents: Annotated[str, typer.Option(help="Its percentages, one after the other.")] = "5,25,50,100",
    window: Annotated[float, typer.Option(min=1, help="Seconds of measuring after each of them.")] = 300.0,
    looks: Annotated[int, typer.Option(min=1, max=20, help="How often to look for a failure meanwhile.")] = 3,
    at_most: Annotated[
        list[str] | None, typer.Option(help="METRIC=LIMIT, as ttft=1.1; repeatable. Default: ttft, tpot, error_rate.")
    ] = None,
    min_samples: Annotated[int, typer.Option(min=1)] = 100,
    url: UrlOption = DEFAULT_URL,
    reason: ReasonOption = "",
) -> None:
    """Begin a rollout that a file describes, or flags."""
    if (file is None) == (rule is None):
        die("give either a file or --rule")
    if file is not None:
        text = read_text(file)
    else:
        limits = at_most or ["ttft=1.2", "tpot=1.1", "error_rate=0.01"]
        text = _described(rule, percents, {"window_s": window, "looks": looks}, limits, min_samples)
    answer = call("POST", url, "rollouts", {"text": text, "author": author(), "reason": reason})
    console.print(f"rollout {answer['rollout_id']} of rule {answer['rule']} has begun")


@rollout_app.command("list")
def list_all(url: UrlOption = DEFAULT_URL, limit: Annotated[int, typer.Option(min=1, max=100)] = 20) -> None:
    """Those started last, newest first."""
    table = Table("rollout", "rule", "phase", "percent", "started", "by", "why")
    for item in call("GET", url, "rollouts", limit=limit):
        percent = f"{item['percent']:g}" + " …" * item["is_pending"]
        started = moment(item["started_at"])
        table.add_row(item["rollout_id"], item["rule"], item["phase"], percent, started, item["author"], item["why"])
    print_table(table)


@rollout_app.command("status")
def status(
    rollout_id: IdArgument,
    url: UrlOption = DEFAULT_URL,
    watch: Annotated[bool, typer.Option("--watch", help="Tell each change, until it ends.")] = False,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Where a rollout is, why, and what it has measured."""
    item = call("GET", url, f"rollouts/{rollout_id}")
    if json:
        console.print_json(data=item)
        return
    _print_status(item)
    if watch:
        _print_results(_watched(url, item))


def _add_command(command: RolloutCommand, text: str) -> None:
    @rollout_app.command(command.value, help=text)
    def run(rollout_id: IdArgument, url: UrlOption = DEFAULT_URL, reason: ReasonOption = "") -> None:
        body = {"author": author(), "reason": reason}
        item = call("POST", url, f"rollouts/{rollout_id}/{command.value}", body)
        console.print(f"rollout {rollout_id} is {item['phase']} at {item['percent']:g} %")


_add_command(RolloutCommand.PAUSE, "Hold it where it is.")
_add_command(RolloutCommand.RESUME, "Go on from a pause; measure afresh what was inconclusive.")
_add_command(RolloutCommand.PROMOTE, "Go to the last percentage at once, past any analysis.")
_add_command(RolloutCommand.ABORT, "Go to 0 % at once, for good.")


# --- inside ----------------------------------------------------------------------------------------------------------


def _watched(url: str, item: dict[str, Any]) -> dict[str, Any]:
    """The rollout at its end, after each change has been told. While control is away, this waits."""
    is_away = False
    while item["phase"] not in FINISHED:
        time.sleep(WATCH_S)
        later = call("GET", url, f"rollouts/{item['rollout_id']}", tolerated=_AWAY)
        if later is None:
            if not is_away:
                errors.print("control is away; it goes on where it was when it is back")
        else:
            for event in later["events"]:
                if event not in item["events"]:  # which has the first and the latest only
                    _print_event(event)
            item = later
        is_away = later is None
    return item


def _described(rule: str | None, percents: str, analyse: dict[str, Any], limits: list[str], min_samples: int) -> str:
    """The document that flags describe: each percentage but the last one is followed by an analysis."""
    steps: list[dict[str, Any]] = []
    for percent in (_number(text, "--percents") for text in percents.split(",")):
        steps.append({"set_percent": percent})
        if 0 < percent < 100:
            steps.append({"analyse": dict(analyse)})  # one of its own: YAML would write the same one as an alias
    conditions = [_condition(limit, min_samples) for limit in limits]
    values = {"schema": SCHEMA, "target": {"rule": rule}, "steps": steps, "conditions": conditions}
    try:
        parse_rollout(values)
    except DocumentError as error:
        die(str(error))
    return yaml.safe_dump(values, sort_keys=False)


def _condition(limit: str, min_samples: int) -> dict[str, Any]:
    metric, _, number = limit.partition("=")
    return {"metric": metric, "at_most": _number(number, "--at-most"), "min_samples": min_samples}


def _number(text: str, flag: str) -> float:
    try:
        return float(text)
    except ValueError:
        die(f"{flag}: {text!r} is not a number")


def _print_status(item: dict[str, Any]) -> None:
    spec = parse_rollout(item["text"])
    console.print(
        f"rollout {item['rollout_id']} of rule {item['rule']}: {item['phase']} at {item['percent']:g} %", style="bold"
    )
    console.print(item["why"], soft_wrap=True)
    _print_steps(spec, item)
    _print_results(item)
    for event in item["events"]:
        _print_event(event)


def _print_steps(spec: RolloutSpec, item: dict[str, Any]) -> None:
    for index, step in enumerate(spec.steps):
        mark = "→" if index == item["step_index"] else "✓" if index < item["step_index"] else " "
        measured = ""
        if mark == "→" and item["num_canary"] is not None:
            measured = f" ({item['num_canary']} canary, {item['num_control']} control so far)"
        console.print(f"  {mark} {_said(step)}{measured}")


def _said(step: Step) -> str:
    if step.set_percent is not None:
        return f"{step.set_percent:g} %"
    if step.pause is not None:
        return "pause until resumed" if step.pause.seconds is None else f"pause {step.pause.seconds:g} s"
    assert step.analyse is not None
    return f"analyse {step.analyse.window_s:g} s"


def _print_results(item: dict[str, Any]) -> None:
    if not item["results"]:
        return
    table = Table("metric", "verdict", "canary", "control", "what was found", title=f"last look: {item['verdict']}")
    for result in item["results"]:
        counts = str(result["num_canary"]), str(result["num_control"])
        table.add_row(result["metric"], result["verdict"], *counts, result["reason"])
    print_table(table)


def _print_event(event: dict[str, Any]) -> None:
    where = f"{event['phase']}, step {event['step_index'] + 1}, {event['percent']:g} %"
    console.print(f"{moment(event['at'])}  {where}: {event['reason']}", soft_wrap=True)
