"""Three rollouts on a live cluster, with their timelines: a good drafter, a poisoned draft, and too little traffic.

    python -m load_tests.rollouts [--window 20] [--clients 6]

Starts a cluster whose draft model guesses at random, and slowly, while n-grams guess the traffic well (`poisoned.py`).
Each rollout has its own tenant, its own clients and a rule that speculates for a share of them, by 25, 50 and 100 %.
During the first one, control is killed with SIGKILL. The last one has no traffic at all.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from cluster.config import ClusterConfig
from cluster.transport.admin_token import ADMIN_TOKEN_VARIABLE
from load_tests.bench import free_port
from load_tests.poisoned import MODEL, NGRAM, POISONED, POLICY, PROMPT, QUIET, poisoned_config, rollout_of

POLL_S = 0.25
FINISHED = ("successful", "failed", "aborted", "inconclusive")
PERCENTS = (25.0, 50.0)

console = Console()


@dataclass(frozen=True, slots=True)
class Plan:
    """What each rollout does."""

    window_s: float
    looks: int
    min_samples: int
    num_clients: int

    def rollout(self, rule: str) -> str:
        return rollout_of(rule, self.window_s, self.looks, self.min_samples, PERCENTS)


@dataclass(frozen=True, slots=True)
class Admin:
    """The system's APIs. Control may be away for a moment."""

    http: httpx.AsyncClient
    token: str

    async def call(self, method: str, path: str, **body: Any) -> Any:
        """The answer; tried again while control is away."""
        headers = {"authorization": f"Bearer {self.token}"}
        while True:
            answer = await self.http.request(method, f"/admin/v1/{path}", json=body or None, headers=headers)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                return answer.raise_for_status().json()
            await asyncio.sleep(POLL_S)

    async def complete(self, tenant: str) -> None:
        """One request from end to end."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
        headers = {"x-paceline-tenant": tenant}
        (await self.http.post("/v1/completions", json=body, headers=headers)).raise_for_status()


@asynccontextmanager
async def traffic(admin: Admin, tenant: str, num_clients: int) -> AsyncIterator[None]:
    """Clients of a tenant, each of which sends its next request when the last one has ended. None may fail."""

    async def client() -> None:
        while True:
            await admin.complete(tenant)

    clients = [asyncio.create_task(client()) for _ in range(num_clients)]
    try:
        yield
    finally:
        for task in clients:
            task.cancel()
        for ended in await asyncio.gather(*clients, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise RuntimeError("a request failed") from ended


async def follow(admin: Admin, rule: str, plan: Plan, kill: bool) -> dict[str, Any]:
    """Run a rollout to its end, or until it holds, and print each change as it comes."""
    item = await admin.call("POST", "rollouts", text=plan.rollout(rule), author="load test", reason="")
    console.print(f"\n[bold]{rule}[/bold]: rollout {item['rollout_id']}", highlight=False)
    num_told, is_killed = 0, not kill
    with Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        while True:
            for event in item["events"][num_told:]:
                _tell(item, event)
            num_told = len(item["events"])
            progress.update(task, description=_where(item))
            if item["phase"] in FINISHED and not item["is_pending"]:
                return dict(item)
            if not is_killed and item["step_index"] == 3 and item["num_canary"]:
                is_killed = True
                _kill_control()
                console.print("          control is killed (SIGKILL) while it measures")
            await asyncio.sleep(POLL_S)
            item = await admin.call("GET", f"rollouts/{item['rollout_id']}")


def _where(item: dict[str, Any]) -> str:
    counts = "" if item["num_canary"] is None else f"{item['num_canary']} canary, {item['num_control']} control"
    return f"{item['phase']}, step {item['step_index'] + 1}, {item['percent']:g} % {counts}"


def _tell(item: dict[str, Any], event: dict[str, Any]) -> None:
    after_s = event["at"] - item["started_at"]
    where = f"step {event['step_index'] + 1}, {event['percent']:g} %"
    line = f"{after_s:7.2f} s  {event['phase']:12}  {where:15}  {event['reason']}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _kill_control() -> None:
    """kill -9 of the control replica that this process has started."""
    for path in Path("/proc").glob("[0-9]*"):
        title = (path / "cmdline").read_bytes() if (path / "cmdline").exists() else b""
        if title.startswith(b"ray::ServeReplica:paceline:control") and os.getpid() in _ancestors(int(path.name)):
            os.kill(int(path.name), signal.SIGKILL)


def _ancestors(pid: int) -> set[int]:
    found = {pid}
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        found.add(pid)
    return found


async def run_all(url: str, token: str, plan: Plan) -> list[dict[str, Any]]:
    """One rollout after the other."""
    ended = []
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        admin = Admin(http, token)
        await admin.call("PUT", "policy", text=POLICY, author="load test", reason="rules to roll out")
        for rule in (NGRAM, POISONED, QUIET):
            async with traffic(admin, rule, 0 if rule == QUIET else plan.num_clients):
                ended.append(await follow(admin, rule, plan, kill=rule == NGRAM))
        text = (await admin.call("GET", "policy"))["text"]
        console.print("\nthe policy in force afterwards:\n" + text, highlight=False, markup=False)
    return ended


def main(
    window: Annotated[float, typer.Option(min=1, help="Seconds of each analysis.")] = 20.0,
    looks: Annotated[int, typer.Option(min=1, max=20)] = 4,
    min_samples: Annotated[int, typer.Option(min=1)] = 15,
    clients: Annotated[int, typer.Option(min=1)] = 6,
    out: Annotated[Path | None, typer.Option(help="Write the rollouts as JSON.")] = None,
) -> None:
    """Run them, and print their timelines."""
    from deployments.local_cluster import running

    token = os.environ.setdefault(ADMIN_TOKEN_VARIABLE, secrets.token_urlsafe(32))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        config = poisoned_config(Path(folder)) | {
            "control": {"store": f"sqlite://{folder}/control.db"},
            "router": {"http_port": free_port(), "grpc_port": free_port()},
        }
        with running(ClusterConfig.model_validate(config)):
            console.print(f"the cluster is up after {time.monotonic() - began:.0f} s", highlight=False)
            url = f"http://127.0.0.1:{config['router']['http_port']}"
            ended = asyncio.run(run_all(url, token, Plan(window, looks, min_samples, clients)))
    if out is not None:
        out.write_text(json.dumps(ended, indent=1))


if __name__ == "__main__":
    typer.run(main)
