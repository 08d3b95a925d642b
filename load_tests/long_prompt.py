"""What a long prompt does to running streams: their longest pause against the usual one.

    python -m load_tests.long_prompt [--prompt-tokens 6000] [--streams 4] [--repeats 3] [--url URL]

Runs router and engines in this process unless --url names a system that runs. Random prompts; random tokens are hard to
guess, so speculation costs and does not pay here: it is off unless --speculate.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
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

STREAM_PROMPT_TOKENS = 64
STREAM_MAX_TOKENS = 512  # a stream that ends is followed by another one


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """One long prompt beside running streams. Inter-token latencies (ITL) of the streams, in milliseconds.

    `during` is from the arrival of the long prompt to its first token. The medians are over the streams' whole run, and
    over the part before the prompt; the longest pauses before it say how quiet the machine is.
    """

    prompt_tokens: int
    ttft_s: float
    num_parts_during: int
    median_itl_ms: float
    median_itl_before_ms: float
    p99_itl_before_ms: float
    max_itl_before_ms: float
    median_itl_during_ms: float
    p99_itl_during_ms: float
    max_itl_during_ms: float

    @property
    def max_to_median(self) -> float:
        return self.max_itl_during_ms / self.median_itl_ms

    @property
    def max_to_median_before(self) -> float:
        return self.max_itl_during_ms / self.median_itl_before_ms

    @property
    def p99_to_median_before(self) -> float:
        return self.p99_itl_during_ms / self.median_itl_before_ms

    @property
    def noise(self) -> float:
        """The same ratio without any long prompt."""
        return self.max_itl_before_ms / self.median_itl_before_ms


class Streams:
    """Owns streams that go on until they are stopped, and the times of their tokens."""

    def __init__(self, client: Client, num_streams: int, speculate: bool, random: Random) -> None:
        self.requests: list[Timed] = []
        self._client = client
        self._speculate = speculate
        self._random = random
        self._tasks = [asyncio.create_task(self._run()) for _ in range(num_streams)]

    def num_parts(self) -> int:
        return sum(len(timed.times) for timed in self.requests)

    async def more(self, num_parts: int) -> None:
        """Wait until so many more parts have come."""
        until = self.num_parts() + num_parts
        while self.num_parts() < until:
            await asyncio.sleep(0.01)  # between two looks at a condition
            for task in self._tasks:
                if task.done():
                    task.result()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            timed = Timed()
            self.requests.append(timed)
            prompt = random_prompt(self._random, STREAM_PROMPT_TOKENS)
            await run_timed(self._client, Ask(prompt, STREAM_MAX_TOKENS, speculate=self._speculate), timed)


async def measure(
    client: Client, prompt_tokens: int, num_streams: int, *, parts_before: int, speculate: bool, random: Random
) -> LongPrompt:
    """Let the streams run, send the long prompt, let them run on after it."""
    streams = Streams(client, num_streams, speculate, random)
    await streams.more(parts_before // 4)
    began = time.perf_counter()
    await streams.more(parts_before)
    long = Timed()
    await run_timed(client, Ask(random_prompt(random, prompt_tokens), 1, speculate=speculate), long)
    await streams.more(parts_before // 4)
    await streams.stop()
    gaps = [gap for timed in streams.requests for gap in timed.gaps() if gap[0] > began]
    before = [1e3 * gap_s for now, gap_s in gaps if now < long.sent]
    during = [1e3 * gap_s for now, gap_s in gaps if now - gap_s < long.times[0] and now > long.sent]
    return LongPrompt(
        prompt_tokens=prompt_tokens,
        ttft_s=long.ttft_s,
        num_parts_during=len(during),
        median_itl_ms=statistics.median(1e3 * gap_s for _, gap_s in gaps),
        median_itl_before_ms=statistics.median(before),
        p99_itl_before_ms=percentile(before, 0.99),
        max_itl_before_ms=max(before),
        median_itl_during_ms=statistics.median(during),
        p99_itl_during_ms=percentile(during, 0.99),
        max_itl_during_ms=max(during),
    )


def ratios(runs: list[LongPrompt]) -> dict[str, Spread]:
    """By what they say, over the repeats."""
    return {
        "max ITL during / median of the whole run": Spread.of([run.max_to_median for run in runs]),
        "max ITL during / median before": Spread.of([run.max_to_median_before for run in runs]),
        "P99 ITL during / median before": Spread.of([run.p99_to_median_before for run in runs]),
        "max / median, both before the prompt": Spread.of([run.noise for run in runs]),
    }


def served_model(max_tokens: int, dtype: DType) -> ModelConfig:
    """The demo with room for the prompt and the streams."""
    return ModelConfig(
        name=MODEL,
        target=PoolConfig(path=MODEL, dtype=dtype, kv_blocks=max_tokens // 16 + 512),
        draft=PoolConfig(path="smollm2-135m-draft", dtype=dtype, kv_blocks=max_tokens // 16 + 512, num_threads=1),
    )


async def run_all(
    url: str | None, prompt_tokens: int, streams: int, repeats: int, speculate: bool, dtype: DType
) -> list[LongPrompt]:
    """One system, `repeats` long prompts in turn."""
    runs = []
    async with connected(url, served_model(prompt_tokens, dtype)) as client:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("long prompts", total=repeats)
            for number in range(repeats):
                random = Random(number)
                runs.append(
                    await measure(client, prompt_tokens, streams, parts_before=400, speculate=speculate, random=random)
                )
                progress.advance(task)
    return runs


def main(
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 6000,
    streams: Annotated[int, typer.Option(min=1)] = 4,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    speculate: Annotated[bool, typer.Option("--speculate/--no-speculate")] = False,
    dtype: DType = DType.BFLOAT16,
    url: Annotated[str | None, typer.Option(help="A running system, as http://127.0.0.1:8000.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the runs as JSON.")] = None,
) -> None:
    """Measure, and print ratios."""
    runs = asyncio.run(run_all(url, prompt_tokens, streams, repeats, speculate, dtype))
    table = Table("ratio", "median [P10, P90] of repeats", title=f"{prompt_tokens} tokens beside {streams} streams")
    for name, spread in ratios(runs).items():
        table.add_row(name, str(spread))
    console = Console()
    for run in runs:
        console.print(json.dumps(asdict(run)))
    console.print(table)
    if out is not None:
        rows = [asdict(run) for run in runs]
        out.write_text(json.dumps({"runs": rows, "ratios": {k: asdict(v) for k, v in ratios(runs).items()}}, indent=1))


if __name__ == "__main__":
    typer.run(main)
