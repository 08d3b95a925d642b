"""Many requests of random lengths whose clients go away at random moments: afterwards every KV block must be free.

    python -m load_tests.cancels --requests 1000
    python -m load_tests.cancels --requests 10000 --max-prompt 24 --max-tokens 8     # memory over many requests

Starts a cluster of its own. Exits with 1 if a request failed or a block is still held when nothing runs. Tells each
process's resident memory after every quarter of the requests.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any

import grpc
import httpx
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cluster.config import DType
from load_tests.bench import MODEL, bench_config
from load_tests.compare.process_tree import rss_mib_by_title
from protos.paceline.v1 import inference_pb2 as pb
from protos.paceline.v1 import inference_pb2_grpc

IDLE_TIMEOUT_S = 5.0
_SMALLEST_MIB = 20.0  # of a process that is listed
_TITLE_LENGTH = 60


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of a request, at most."""

    prompt: int
    output: int


def random_request(random: Random, sizes: Sizes) -> pb.GenerateRequest:
    """Any prompt length, output length, temperature and kind of speculation."""
    return pb.GenerateRequest(
        model=MODEL,
        token_ids=pb.TokenIds(ids=[random.randrange(20, 40_000) for _ in range(random.randint(1, sizes.prompt))]),
        max_tokens=random.randint(1, sizes.output),
        temperature=random.choice((0.0, 0.7, 1.0)),
        seed=random.getrandbits(32),
        ignore_eos=random.random() < 0.5,
        speculation=pb.Speculation(enabled=random.random() < 0.8, drafter=random.choice(("model", "ngram", "auto"))),
    )


async def run_one(stub: Any, random: Random, sizes: Sizes) -> str:
    """How the request ended: finished, cancelled by this client, or the status it failed with."""
    call = stub.Generate(random_request(random, sizes), timeout=300)
    patience = random.randint(0, 40) if random.random() < 0.5 else None
    try:
        if patience == 0:
            call.cancel()
        num_responses = 0
        async for _ in call:
            num_responses += 1
            if num_responses == patience:
                call.cancel()
    except asyncio.CancelledError:
        if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # it is this run that is cancelled
            raise
        return "cancelled"
    except grpc.aio.AioRpcError as error:
        return str(error.code())
    return "finished"


async def run_all(
    address: str, num_requests: int, concurrency: int, seed: int, sizes: Sizes
) -> tuple[Counter[str], list[dict[str, float]]]:
    """Outcomes of all requests, at most `concurrency` at a time, and memory after each quarter of them."""
    outcomes: Counter[str] = Counter()
    memory: list[dict[str, float]] = []
    gate = asyncio.Semaphore(concurrency)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("requests", total=num_requests)

            async def run(number: int) -> None:
                async with gate:
                    outcomes[await run_one(stub, Random(seed * 1_000_003 + number), sizes)] += 1
                    progress.advance(task)
                    if outcomes.total() * 4 // num_requests > len(memory):
                        memory.append(rss_mib_by_title(os.getpid()))

            await asyncio.gather(*map(run, range(num_requests)))
    return outcomes, memory


def memory_table(memory: list[dict[str, float]]) -> Table:
    """Each process's memory after every quarter; the smallest are summed up."""
    table = Table("process", *(f"MiB after {quarter}/4" for quarter in range(1, len(memory) + 1)))
    for title in sorted(memory[-1], key=lambda title: -memory[-1][title]):
        if memory[-1][title] >= _SMALLEST_MIB:
            table.add_row(
                title.removeprefix("ray::ServeReplica:")[:_TITLE_LENGTH],
                *(f"{sizes.get(title, 0):.0f}" for sizes in memory),
            )
    table.add_row("all", *(f"{sum(sizes.values()):.0f}" for sizes in memory))
    return table


def free_blocks(url: str) -> dict[str, tuple[int, int]]:
    """(free, total) KV blocks of each pool, as the router sees them."""
    replicas = httpx.get(f"{url}/status", timeout=10).json()["replicas"]
    return {item["pool"]: (item["load"]["num_free_blocks"], item["load"]["num_total_blocks"]) for item in replicas}


def wait_for_idle(url: str) -> tuple[dict[str, tuple[int, int]], float]:
    """The pools' blocks once all are free, or after IDLE_TIMEOUT_S; and how long it took in seconds."""
    began = time.monotonic()
    while True:
        blocks = free_blocks(url)
        waited = time.monotonic() - began
        if all(free == total for free, total in blocks.values()) or waited > IDLE_TIMEOUT_S:
            return blocks, waited
        time.sleep(0.05)  # between two looks at a condition


def main(
    requests: Annotated[int, typer.Option(min=4)] = 1000,
    concurrency: int = 16,
    seed: int = 0,
    max_prompt: int = 300,
    max_tokens: int = 60,
) -> None:
    """Run the requests and look for leaks."""
    from deployments.local_cluster import running

    config = bench_config(4, DType.BFLOAT16)
    with running(config):
        began = time.monotonic()
        address, sizes = f"127.0.0.1:{config.router.grpc_port}", Sizes(max_prompt, max_tokens)
        outcomes, memory = asyncio.run(run_all(address, requests, concurrency, seed, sizes))
        seconds = time.monotonic() - began
        blocks, waited = wait_for_idle(f"http://127.0.0.1:{config.router.http_port}")
    console = Console()
    console.print(f"{requests} requests in {seconds:.0f} s: {dict(outcomes)}")
    console.print(f"idle after {waited:.2f} s; free/total blocks: {blocks}")
    console.print(memory_table(memory))
    is_clean = all(free == total for free, total in blocks.values()) and set(outcomes) <= {"finished", "cancelled"}
    raise typer.Exit(0 if is_clean else 1)


if __name__ == "__main__":
    typer.run(main)
