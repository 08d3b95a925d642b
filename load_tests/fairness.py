"""What a loud tenant costs a quiet one: the quiet one's time to first token, alone and beside ten times its load.

    python -m load_tests.fairness [--quiet-clients 2] [--times 10] [--requests 24] [--repeats 3] [--url URL]

Every client sends its next request when the last one has ended, so ten times the clients are ten times the load.
Alone and beside the other take turns, `repeats` times. Runs router and engines in this process unless --url names a
system that runs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cluster.config import DType, ModelConfig, PoolConfig
from load_tests.spread import Spread
from load_tests.timed_streams import MODEL, Ask, Client, Timed, connected, percentile, random_prompt, run_timed

QUIET, LOUD = "quiet", "loud"


@dataclass(frozen=True, slots=True)
class Load:
    """What each client sends."""

    quiet_clients: int
    loud_clients: int
    prompt_tokens: int
    max_tokens: int
    requests: int  # of the quiet tenant, in each arm


@dataclass(frozen=True, slots=True)
class Pair:
    """The quiet tenant's times to first token in one turn of both arms, in milliseconds."""

    alone_p50_ms: float
    alone_p95_ms: float
    beside_p50_ms: float
    beside_p95_ms: float
    loud_requests: int  # that ended during the arm

    @property
    def p95_ratio(self) -> float:
        return self.beside_p95_ms / self.alone_p95_ms

    @property
    def p50_ratio(self) -> float:
        return self.beside_p50_ms / self.alone_p50_ms


def asks(load: Load, tenant: str, random: Random) -> Iterator[Ask]:
    """Requests of one tenant without end; lengths vary by half."""
    while True:
        length = random.randint(load.prompt_tokens // 2, load.prompt_tokens * 3 // 2)
        max_tokens = random.randint(max(1, load.max_tokens // 2), load.max_tokens * 3 // 2)
        yield Ask(random_prompt(random, length), max_tokens, tenant)


async def quiet_ttfts_ms(client: Client, load: Load, random: Random) -> list[float]:
    """Run the quiet tenant's requests."""
    timed = [Timed() for _ in range(load.requests)]
    pending, source = iter(timed), asks(load, QUIET, random)

    async def run_client() -> None:
        for item in pending:
            item.sent = Timed().sent
            await run_timed(client, next(source), item)

    await asyncio.gather(*(run_client() for _ in range(load.quiet_clients)))
    return [1e3 * item.ttft_s for item in timed]


@asynccontextmanager
async def loud_neighbour(client: Client, load: Load, random: Random) -> AsyncIterator[list[Timed]]:
    """Keep the loud tenant's clients busy; the list has its requests that have ended."""
    ended: list[Timed] = []
    is_mixed = asyncio.Event()  # the clients are out of step with one another
    source = asks(load, LOUD, random)

    async def run_client() -> None:
        while True:
            timed = Timed()
            await run_timed(client, next(source), timed)
            ended.append(timed)
            if len(ended) >= load.loud_clients // 2:
                is_mixed.set()

    tasks = [asyncio.create_task(run_client()) for _ in range(load.loud_clients)]
    try:
        await is_mixed.wait()
        yield ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(client: Client, load: Load, random: Random) -> Pair:
    """Both arms, with the same quiet requests."""
    seed = random.getrandbits(32)
    alone = await quiet_ttfts_ms(client, load, Random(seed))
    async with loud_neighbour(client, load, random) as ended:
        num_before = len(ended)
        beside = await quiet_ttfts_ms(client, load, Random(seed + 1))
        num_loud = len(ended) - num_before
    return Pair(
        alone_p50_ms=percentile(alone, 0.5),
        alone_p95_ms=percentile(alone, 0.95),
        beside_p50_ms=percentile(beside, 0.5),
        beside_p95_ms=percentile(beside, 0.95),
        loud_requests=num_loud,
    )


def served_model(dtype: DType, max_num_seqs: int) -> ModelConfig:
    return ModelConfig(
        name=MODEL, target=PoolConfig(path=MODEL, dtype=dtype, kv_blocks=1024, max_num_seqs=max_num_seqs)
    )


async def run_all(url: str | None, load: Load, repeats: int, dtype: DType, max_num_seqs: int) -> list[Pair]:
    """One system; both arms `repeats` times in turn."""
    pairs = []
    async with connected(url, served_model(dtype, max_num_seqs)) as client:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("alone, beside", total=repeats)
            for number in range(repeats):
                pairs.append(await measure(client, load, Random(number)))
                progress.advance(task)
    return pairs


def ratios(pairs: list[Pair]) -> dict[str, Spread]:
    return {
        "P95 TTFT beside / alone": Spread.of([pair.p95_ratio for pair in pairs]),
        "median TTFT beside / alone": Spread.of([pair.p50_ratio for pair in pairs]),
    }


def main(
    quiet_clients: Annotated[int, typer.Option(min=1)] = 2,
    times: Annotated[int, typer.Option(min=1, help="The loud tenant's clients per quiet client.")] = 10,
    prompt_tokens: Annotated[int, typer.Option(min=2)] = 200,
    max_tokens: Annotated[int, typer.Option(min=1)] = 32,
    requests: Annotated[int, typer.Option(min=2, help="Of the quiet tenant, per arm.")] = 24,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Of the system in this process.")] = 64,
    dtype: DType = DType.BFLOAT16,
    url: Annotated[str | None, typer.Option(help="A running system, as http://127.0.0.1:8000.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the pairs as JSON.")] = None,
) -> None:
    """Measure, and print ratios."""
    load = Load(quiet_clients, quiet_clients * times, prompt_tokens, max_tokens, requests)
    pairs = asyncio.run(run_all(url, load, repeats, dtype, max_num_seqs))
    console = Console()
    for pair in pairs:
        console.print(json.dumps(asdict(pair)))
    table = Table(
        "ratio", "median [P10, P90] of repeats", title=f"{load.quiet_clients} clients beside {load.loud_clients}"
    )
    for name, spread in ratios(pairs).items():
        table.add_row(name, str(spread))
    console.print(table)
    if out is not None:
        rows = {"pairs": [asdict(pair) for pair in pairs], "ratios": {k: asdict(v) for k, v in ratios(pairs).items()}}
        out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    typer.run(main)
