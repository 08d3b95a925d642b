"""Preemption changes no token: many requests on a KV pool that is too small for them, against one that is not.

    python -m load_tests.preemption [--requests 200] [--kv-blocks 96] [--concurrency 24]

float32, router and engines in this process, with speculation off and on. Exits with 1 if a token is lost or differs, if
nothing was preempted, or if a block is still held when nothing runs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cluster.config import ClusterConfig, DType, ModelConfig, PoolConfig
from cluster.messages.request import GenerateRequest, SamplingParams, SpeculationOverride
from cluster.messages.rounds import PoolLoad
from cluster.router.local import LocalModel, LocalSystem, load_local_model
from cluster.runtime.engine import Engine
from load_tests.losslessness import MODEL, Output, num_differing, run_all
from load_tests.timed_streams import random_prompt

DRAFT = "smollm2-135m-draft"
AMPLE_BLOCKS = 2048
IDLE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of every pool; lengths are random up to the greatest."""

    num_requests: int
    concurrency: int
    max_prompt: int = 160
    max_output: int = 96


@dataclass(frozen=True, slots=True)
class Arm:
    """All requests on one pool."""

    kv_blocks: int
    speculation: bool
    preemptions: int
    tokens: int
    differing: int  # from the first arm; missing and surplus ones counted
    free_blocks: int  # when idle


def system_config(kv_blocks: int, concurrency: int) -> ClusterConfig:
    pool = PoolConfig(path=MODEL, dtype=DType.FLOAT32, kv_blocks=kv_blocks, max_model_len=512, max_num_seqs=concurrency)
    draft = PoolConfig(path=DRAFT, dtype=DType.FLOAT32, kv_blocks=AMPLE_BLOCKS, max_model_len=512)
    return ClusterConfig(models=(ModelConfig(name=MODEL, target=pool, draft=draft),))


def mixed_requests(workload: Workload, speculation: bool) -> list[GenerateRequest]:
    """Prompts and outputs of any length, three tenants, three priorities, three temperatures."""
    requests = []
    for number in range(workload.num_requests):
        random = Random(number)
        prompt = random_prompt(random, random.randint(1, workload.max_prompt))
        max_tokens = random.randint(1, workload.max_output)
        temperature = random.choice((0.0, 0.7, 1.0))
        sampling = SamplingParams(max_tokens, number, temperature, ignore_eos=random.random() < 0.5)
        requests.append(
            GenerateRequest(
                f"{number}-{speculation}", MODEL, prompt, sampling,
                tenant=random.choice(("a", "b", "c")), priority=random.randint(-1, 1),
                speculation=SpeculationOverride(enabled=speculation),
            )
        )  # fmt: skip
    return requests


async def free_when_idle(target: Engine) -> int:
    """Free blocks once all are free, or after IDLE_TIMEOUT_S."""
    until = time.monotonic() + IDLE_TIMEOUT_S
    load: PoolLoad = target.load()
    while load.num_free_blocks < load.num_total_blocks and time.monotonic() < until:
        await asyncio.sleep(0.01)  # between two looks at a condition
        load = target.load()
    return load.num_free_blocks


async def run_arms(
    kv_blocks: int, workload: Workload, expected: Sequence[Output] | None, progress: Progress
) -> list[tuple[Arm, list[Output]]]:
    """Speculation off, then on, on one system."""
    config = system_config(kv_blocks, workload.concurrency)
    local: LocalModel = load_local_model(config.models[0], config)
    arms: list[tuple[Arm, list[Output]]] = []
    async with LocalSystem(config, {MODEL: local}) as system:
        for speculation in (False, True):
            before = local.target.stats().num_preemptions
            outputs = await run_all(system.router, mixed_requests(workload, speculation), workload.concurrency)
            reference = expected or (arms[0][1] if arms else outputs)
            arm = Arm(
                kv_blocks=kv_blocks,
                speculation=speculation,
                preemptions=local.target.stats().num_preemptions - before,
                tokens=sum(len(output.token_ids) for output in outputs),
                differing=num_differing(reference, outputs),
                free_blocks=await free_when_idle(local.target),
            )
            arms.append((arm, outputs))
            progress.console.log(json.dumps(asdict(arm)))
            progress.advance(progress.task_ids[0])
    return arms


async def measure(workload: Workload, kv_blocks: int, progress: Progress) -> list[Arm]:
    """Ample KV without and with speculation, then short KV: everything against the first."""
    progress.add_task("preemption", total=4)
    ample = await run_arms(AMPLE_BLOCKS, workload, None, progress)
    short = await run_arms(kv_blocks, workload, ample[0][1], progress)
    return [arm for arm, _ in (*ample, *short)]


def is_good(arms: Sequence[Arm], kv_blocks: int) -> bool:
    """Whether tokens are the same, blocks are free, and short pools were short."""
    return all(
        arm.differing == 0 and arm.free_blocks == arm.kv_blocks and (arm.preemptions > 0 or arm.kv_blocks > kv_blocks)
        for arm in arms
    )


def main(
    requests: Annotated[int, typer.Option(min=1)] = 200,
    kv_blocks: Annotated[int, typer.Option(min=32, help="Of the pool that is too small; 16 tokens each.")] = 96,
    concurrency: Annotated[int, typer.Option(min=2)] = 24,
    out: Annotated[Path | None, typer.Option(help="Write the arms as JSON.")] = None,
) -> None:
    """Compare the pools."""
    console = Console()
    with Progress(console=console) as progress:
        arms = asyncio.run(measure(Workload(requests, concurrency), kv_blocks, progress))
    table = Table("KV blocks", "speculation", "preemptions", "tokens", "lost or changed", "free at idle")
    for arm in arms:
        table.add_row(
            *map(str, (arm.kv_blocks, arm.speculation, arm.preemptions, arm.tokens, arm.differing, arm.free_blocks))
        )
    console.print(table)
    if out is not None:
        out.write_text(json.dumps([asdict(arm) for arm in arms], indent=1))
    raise typer.Exit(0 if is_good(arms, kv_blocks) else 1)


if __name__ == "__main__":
    typer.run(main)
