"""How fast the kill switch is: from the command to the last proposal that a router forwards, with streams running.

    python -m load_tests.kill_switch [--streams 32] [--repeats 20] [--url URL]

Clients keep `streams` requests running all the time. Again and again, once every stream is running and proposals flow,
`POST /admin/v1/speculation` turns speculation off. When the streams have gone on without guesses, the router is asked
when it forwarded its last proposal (`paceline_last_proposal_timestamp_seconds`). Proposals come in bursts, once per
target step, and often none falls between the command and its effect; so the router's own time of putting the policy in
force (`paceline_policy_applied_timestamp_seconds`) is reported too: nothing is forwarded after it. All times are by
this machine's clock. Every text is compared with the same request's text with speculation off.

Starts a cluster in float32 unless --url names a system that runs; that one must be on this machine, have one router,
and serve nobody else.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress

from cluster.config import ClusterConfig, ControlConfig, DType, ModelConfig, PoolConfig, RouterConfig, SpeculationConfig
from cluster.messages.request import DraftLengthMode, HoldMode
from cluster.transport.admin_token import ADMIN_TOKEN_VARIABLE
from load_tests.bench import free_port
from load_tests.machine import machine_facts
from load_tests.timed_streams import MODEL, percentile, random_prompt

PROMPT_TOKENS = 16
PARTS_AFTER = 3  # of each stream, on average, before the last proposal is taken for the last
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Switch:
    """One time that speculation was turned off. Seconds from the command.

    last_proposal_s: below 0 if none came after it. in_force_s: when the router had the policy, after which none can.
    """

    last_proposal_s: float
    in_force_s: float
    answered_s: float
    live_streams: int


@dataclass(slots=True)
class Streams:
    """Owns the clients' counts, and what every prompt's text must be."""

    texts: dict[int, str] = field(default_factory=dict)  # by prompt
    live: set[int] = field(default_factory=set)  # streams whose first part has come and whose last has not
    num_parts: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    is_over: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def part(self, prompt: int) -> None:
        """A part of a stream's text has come."""
        self.live.add(prompt)
        self.num_parts += 1
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what is counted here to fulfil a condition."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def end(self, prompt: int, text: str) -> None:
        """A stream has given all of its text."""
        expected = self.texts.setdefault(prompt, text)
        self.outcomes["same text" if text == expected else "different text"] += 1


@dataclass(frozen=True, slots=True)
class System:
    """A client of the system that is measured."""

    http: httpx.AsyncClient
    max_tokens: int
    admin_token: str

    async def text(self, prompt: int, streams: Streams) -> str:
        """Run one greedy request. Raises RuntimeError if it ends with an error."""
        token_ids = random_prompt(Random(prompt), PROMPT_TOKENS)
        body = {"model": MODEL, "prompt": list(token_ids), "max_tokens": self.max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True}
        text: list[str] = []
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text.append(_text(json.loads(line.removeprefix("data: "))))
                    streams.part(prompt)
        if response.is_error:
            raise RuntimeError(f"a request ended with status {response.status_code}")
        return "".join(text)

    async def switch(self, enabled: bool) -> None:
        body = {"enabled": enabled, "author": "load test", "reason": "measuring the kill switch"}
        headers = {"authorization": f"Bearer {self.admin_token}"}
        (await self.http.post("/admin/v1/speculation", json=body, headers=headers)).raise_for_status()

    async def router_total(self, name: str) -> float:
        """The sum of a router's samples of that name."""
        text = (await self.http.get("/metrics")).raise_for_status().text
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == name)


def _text(chunk: dict[str, Any]) -> str:
    if "error" in chunk:
        raise RuntimeError(str(chunk["error"]))
    return "".join(choice["text"] for choice in chunk["choices"])


async def run_client(system: System, prompt: int, streams: Streams) -> None:
    """Send the same prompt again and again, until the measurement is over."""
    while not streams.is_over:
        try:
            streams.end(prompt, await system.text(prompt, streams))
        except (RuntimeError, httpx.HTTPError):
            streams.outcomes["failed"] += 1
        finally:
            streams.live.discard(prompt)


async def switch_off_once(system: System, streams: Streams, num_streams: int) -> Switch:
    """Wait until every stream runs and proposals flow, switch off, and see when they stopped; then switch on again."""
    await system.switch(True)
    wanted = await system.router_total("paceline_proposals_forwarded_total") + num_streams
    while await system.router_total("paceline_proposals_forwarded_total") < wanted:  # noqa: ASYNC110 - it is elsewhere
        await asyncio.sleep(POLL_S)
    await streams.until(lambda: len(streams.live) == num_streams)
    live, commanded = len(streams.live), time.time()
    await system.switch(False)
    answered = time.time()
    parts = streams.num_parts
    await streams.until(lambda: streams.num_parts >= parts + PARTS_AFTER * num_streams)
    last = await system.router_total("paceline_last_proposal_timestamp_seconds")
    in_force = await system.router_total("paceline_policy_applied_timestamp_seconds")
    return Switch(last - commanded, in_force - commanded, answered - commanded, live)


async def measure(system: System, num_streams: int, repeats: int) -> tuple[list[Switch], Counter[str]]:
    """Every text with speculation off first, then `repeats` switches over running streams."""
    streams = Streams()
    await system.switch(False)
    texts = await asyncio.gather(*(system.text(prompt, Streams()) for prompt in range(num_streams)))
    streams.texts = dict(enumerate(texts))
    clients = [asyncio.create_task(run_client(system, prompt, streams)) for prompt in range(num_streams)]
    try:
        with Progress(console=Console(stderr=True)) as progress:
            turns = progress.track(range(repeats), description="switching off")
            switches = [await switch_off_once(system, streams, num_streams) for _ in turns]
        streams.is_over = True
        await asyncio.gather(*clients)
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await system.switch(True)
    return switches, streams.outcomes


def demo_config(folder: str, draft_tokens: int, max_num_seqs: int) -> ClusterConfig:
    """The demo in float32, whose rounds all wait for their block, so that every stream always has proposals."""
    pool: dict[str, Any] = {"dtype": DType.FLOAT32, "kv_blocks": 2048, "max_num_seqs": max_num_seqs}
    model = ModelConfig(
        name=MODEL, target=PoolConfig(path=MODEL, **pool), draft=PoolConfig(path="smollm2-135m-draft", **pool)
    )
    return ClusterConfig(
        models=(model,),
        speculation=SpeculationConfig(
            max_draft_tokens=draft_tokens, draft_length=DraftLengthMode.FIXED, hold=HoldMode.DEADLINE
        ),
        router=RouterConfig(http_port=free_port(), grpc_port=free_port()),
        control=ControlConfig(store=f"sqlite:///{folder}/control.db"),
    )


@contextmanager
def serving(url: str | None, draft_tokens: int, num_streams: int) -> Iterator[str]:
    """The URL of the system to measure."""
    if url is not None:
        yield url
        return
    from deployments.local_cluster import running

    os.environ.setdefault(ADMIN_TOKEN_VARIABLE, secrets.token_urlsafe(32))
    with tempfile.TemporaryDirectory() as folder:
        config = demo_config(folder, draft_tokens, num_streams)
        with running(config):
            yield f"http://127.0.0.1:{config.router.http_port}"


async def run_all(
    url: str, admin_token: str, num_streams: int, repeats: int, max_tokens: int
) -> tuple[list[Switch], Counter[str]]:
    """Every switch, and how streams ended."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        return await measure(System(http, max_tokens, admin_token), num_streams, repeats)


def main(
    streams: Annotated[int, typer.Option(min=1, help="Running at the same time.")] = 32,
    repeats: Annotated[int, typer.Option(min=1)] = 20,
    max_tokens: Annotated[int, typer.Option(min=16, help="Of each stream.")] = 128,
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", "-k", min=1, max=32)] = 2,
    url: Annotated[str | None, typer.Option(help="A running system; PACELINE_ADMIN_TOKEN is its token.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write every switch as JSON.")] = None,
) -> None:
    """Measure, and print percentiles."""
    console = Console()
    with serving(url, draft_tokens, streams) as address:
        token = os.environ.get(ADMIN_TOKEN_VARIABLE, "")
        switches, outcomes = asyncio.run(run_all(address, token, streams, repeats, max_tokens))
    console.print(machine_facts(), soft_wrap=True)
    console.print(f"{len(switches)} switches, at least {min(s.live_streams for s in switches)} live streams at each")
    num_after = sum(s.last_proposal_s > 0 for s in switches)
    console.print(f"a proposal was forwarded after the command in {num_after} of {len(switches)}")
    for name, times in (
        ("command → last proposal forwarded", [max(0.0, s.last_proposal_s) for s in switches]),
        ("command → in force at the router", [s.in_force_s for s in switches]),
        ("command → its answer", [s.answered_s for s in switches]),
    ):
        p50, p99 = (1e3 * percentile(times, share) for share in (0.5, 0.99))
        console.print(f"{name}: P50 {p50:.1f} ms, P99 {p99:.1f} ms, longest {1e3 * max(times):.1f} ms")
    console.print(f"streams that ended: {dict(outcomes)}")
    if out is not None:
        out.write_text(json.dumps([asdict(switch) for switch in switches], indent=1))


if __name__ == "__main__":
    typer.run(main)
