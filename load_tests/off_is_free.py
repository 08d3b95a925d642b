"""What speculation costs while it is switched off: time per token beside a system that was built without it.

    python -m load_tests.off_is_free [--prompts 8] [--repeats 5] [--streams 1] [--max-tokens 64]

Four systems in this process take turns, prompt by prompt, in an order that rotates: `without` has no draft pool and its
speculation is disabled, `without, again` is a second system built like it, `off` is the whole system with the kill
switch on, `on` is the same with it off. Two systems built alike differ by more than one differs from itself (where its
memory lies, say), so the ratio of the first two is what the others are to be read against. Median ratios have 95 %
confidence intervals from order statistics: of the turns of these systems, not of systems.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cluster.config import ClusterConfig, DType, ModelConfig, PoolConfig, SpeculationConfig
from cluster.control.intervals import Interval, quantile_interval
from cluster.router.local import LocalSystem, load_local_model
from load_tests.machine import machine_facts
from load_tests.spread import Spread
from load_tests.timed_streams import MODEL, Ask, LocalClient, Timed, random_prompt, run_timed

WITHOUT, AGAIN, OFF, ON = "without", "without, again", "off", "on"
KILL = "schema: paceline.policy/v1\nkill: {all: true}\n"
PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Arm:
    """A system, and whether requests ask it for speculation."""

    client: LocalClient
    speculate: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """Every arm's mean time per output token on the same prompts, in milliseconds."""

    tpot_ms: Mapping[str, float]

    def ratio(self, arm: str) -> float:
        return self.tpot_ms[arm] / self.tpot_ms[WITHOUT]


def model_config(dtype: DType, *, with_draft: bool) -> ModelConfig:
    draft = PoolConfig(path="smollm2-135m-draft", dtype=dtype, kv_blocks=512, prefix_cache=False)
    target = PoolConfig(path=MODEL, dtype=dtype, kv_blocks=512, prefix_cache=False)
    return ModelConfig(name=MODEL, target=target, draft=draft if with_draft else None)


@asynccontextmanager
async def system(dtype: DType, *, with_speculation: bool) -> AsyncIterator[LocalSystem]:
    """A started system in this process."""
    model = model_config(dtype, with_draft=with_speculation)
    config = ClusterConfig(models=(model,), speculation=SpeculationConfig(enabled=with_speculation))
    async with LocalSystem(config, {MODEL: load_local_model(model, config)}) as local:
        yield local


@asynccontextmanager
async def all_arms(dtype: DType) -> AsyncIterator[dict[str, Arm]]:
    """Every arm, ready."""
    async with AsyncExitStack() as stack:
        without = await stack.enter_async_context(system(dtype, with_speculation=False))
        again = await stack.enter_async_context(system(dtype, with_speculation=False))
        off = await stack.enter_async_context(system(dtype, with_speculation=True))
        on = await stack.enter_async_context(system(dtype, with_speculation=True))
        off.router.apply_policy(KILL, 1)
        plain = {
            name: Arm(LocalClient(one.router), speculate=False) for name, one in ((WITHOUT, without), (AGAIN, again))
        }
        speculating = {name: Arm(LocalClient(one.router), speculate=True) for name, one in ((OFF, off), (ON, on))}
        yield plain | speculating


async def tpot_ms(arm: Arm, prompts: list[tuple[int, ...]], max_tokens: int) -> float:
    """Of streams that run at the same time: their mean."""
    timed = [Timed() for _ in prompts]
    asks = [Ask(prompt, max_tokens, speculate=arm.speculate) for prompt in prompts]
    await asyncio.gather(*(run_timed(arm.client, ask, item) for ask, item in zip(asks, timed, strict=True)))
    spans = [(item.times[-1] - item.times[0]) / (max_tokens - 1) for item in timed]  # the first part is one token
    return 1e3 * sum(spans) / len(spans)


async def measure(arms: Mapping[str, Arm], prompts: list[tuple[int, ...]], max_tokens: int, first: int) -> Turn:
    """One turn, beginning with the arm of number `first`."""
    names = list(arms)
    order = [names[(first + i) % len(names)] for i in range(len(names))]
    return Turn({name: await tpot_ms(arms[name], prompts, max_tokens) for name in order})


async def run_all(dtype: DType, prompts: int, repeats: int, streams: int, max_tokens: int) -> list[Turn]:
    """`prompts` × `repeats` turns, after one that does not count."""
    turns: list[Turn] = []
    async with all_arms(dtype) as arms:
        sets = [[random_prompt(Random(f"{n} {s}"), PROMPT_TOKENS) for s in range(streams)] for n in range(prompts)]
        await measure(arms, sets[0], max_tokens, 0)
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("without, off, on", total=prompts * repeats)
            for number in range(prompts * repeats):
                turns.append(await measure(arms, sets[number % prompts], max_tokens, number))
                progress.advance(task)
    return turns


def ratios(turns: list[Turn]) -> dict[str, Spread]:
    """Each arm's time per token against `without`, turn by turn."""
    return {arm: Spread.of([turn.ratio(arm) for turn in turns]) for arm in (AGAIN, OFF, ON)}


def median_bounds(turns: list[Turn], arm: str) -> Interval:
    """The median ratio, with bounds that hold in 95 % of cases; infinite with fewer than six turns."""
    return quantile_interval([turn.ratio(arm) for turn in turns], 0.5, 0.025)


def main(
    prompts: Annotated[int, typer.Option(min=1)] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Turns per prompt.")] = 5,
    streams: Annotated[int, typer.Option(min=1, help="At the same time.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=2)] = 64,
    dtype: DType = DType.BFLOAT16,
    out: Annotated[Path | None, typer.Option(help="Write the turns as JSON.")] = None,
) -> None:
    """Measure, and print ratios."""
    console = Console()
    before = machine_facts()
    turns = asyncio.run(run_all(dtype, prompts, repeats, streams, max_tokens))
    console.print(f"{before}; {dtype}", soft_wrap=True)
    times = {arm: Spread.of([turn.tpot_ms[arm] for turn in turns]) for arm in (WITHOUT, AGAIN, OFF, ON)}
    title = f"{len(turns)} turns, {streams} streams × {max_tokens} tokens: median [P10, P90]"
    table = Table("arm", "TPOT in ms", "TPOT / without", "its median, 95 %", title=title)
    found = ratios(turns)
    for arm, spread in times.items():
        bounds = median_bounds(turns, arm)
        shown = (str(found[arm]), f"{bounds.low:.3f} to {bounds.high:.3f}") if arm in found else ("", "")
        table.add_row(arm, str(spread), *shown)
    console.print(table)
    if out is not None:
        out.write_text(json.dumps([asdict(turn) for turn in turns], indent=1))


if __name__ == "__main__":
    typer.run(main)
