"""Tensor parallelism changes no token: 1, 2 and 3 ranks, with and without speculation, in float32, greedy.

    python -m load_tests.tensor_parallel --prompts 32 --max-tokens 32

Runs the router and the engines in this process, ranks in processes of their own. Prints each rank's weights. Exits with
1 if any token differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from cluster.config import ClusterConfig, Device, DraftLengthMode, DType, HoldMode, ModelConfig, PoolConfig
from cluster.config import SpeculationConfig as Speculation
from cluster.messages.request import Drafter, SamplingParams, SpeculationOverride
from cluster.router.local import LocalModel, LocalSystem
from cluster.runtime.checkpoint import load_spec
from cluster.runtime.factory import load_draft_engine, owning, target_engine
from cluster.runtime.leader import build_tensor_parallel_runner
from cluster.runtime.model_runner import ModelRunner, build_runner
from cluster.runtime.model_store import resolve_model
from cluster.runtime.rank_processes import RankProcesses
from cluster.runtime.weights import load_weights
from cluster.tokenizer import Tokenizer
from load_tests.losslessness import MODEL, Output, num_differing, requests_for, run_all
from load_tests.prompts import all_prompts

DRAFT = "smollm2-135m-draft"
CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One size of the target's group, with or without speculation."""

    ranks: int
    speculation: bool
    weight_bytes: tuple[int, ...]
    outputs: Sequence[Output]


def pool(path: str, ranks: int) -> PoolConfig:
    """A float32 pool with room for every stream."""
    return PoolConfig(
        path=path, dtype=DType.FLOAT32, kv_blocks=512, max_model_len=2048, max_num_seqs=8, tensor_parallel=ranks
    )


def system_config(ranks: int) -> ClusterConfig:
    """Every round waits for its block, so that each verification has a full window."""
    return ClusterConfig(
        models=(ModelConfig(name=MODEL, target=pool(MODEL, ranks), draft=pool(DRAFT, 1)),),
        speculation=Speculation(draft_length=DraftLengthMode.FIXED, hold=HoldMode.DEADLINE, max_hold_ms=10_000),
    )


def load_runner(config: PoolConfig) -> tuple[ModelRunner, tuple[int, ...]]:
    """A target's runner, and the bytes of weights that each of its ranks holds."""
    if config.tensor_parallel == 1:
        path = resolve_model(config.path)
        whole = load_weights(path, load_spec(path), torch.float32, torch.device("cpu"))
        return build_runner(config, Device.CPU), (whole.num_bytes,)
    runner = build_tensor_parallel_runner(config, Device.CPU, None, RankProcesses)
    return runner, runner.weight_bytes


async def measure(ranks: int, prompts: Sequence[str], max_tokens: int) -> list[Row]:
    """Both rows of one size."""
    config = system_config(ranks)
    (model,) = config.models
    runner, weight_bytes = load_runner(model.target)
    target = owning(target_engine(runner, model.target, config.speculation), runner)
    draft = load_draft_engine(pool(DRAFT, 1), MODEL, Device.CPU)
    local = LocalModel(target, draft, Tokenizer.load(resolve_model(MODEL)))
    rows = []
    async with LocalSystem(config, {MODEL: local}) as system:
        for speculation in (False, True):
            sampling = SamplingParams(max_tokens, 0, temperature=0.0)
            override = SpeculationOverride(speculation, None, Drafter.MODEL)
            requests = requests_for(system.router, prompts, sampling, override, f"{ranks}-{speculation}")
            rows.append(Row(ranks, speculation, weight_bytes, await run_all(system.router, requests, CONCURRENCY)))
    return rows


def report(rows: Sequence[Row]) -> tuple[Table, int]:
    """The table, and how many tokens differ from one device's plain ones."""
    table = Table("ranks", "speculation", "tokens", "differing", "tokens per step", "MB of weights per rank")
    total = 0
    for row in rows:
        differing = num_differing(rows[0].outputs, row.outputs)
        tokens = sum(len(output.token_ids) for output in row.outputs)
        steps = sum(output.num_steps for output in row.outputs)
        (whole,) = rows[0].weight_bytes
        weights = " ".join(f"{count / 1e6:.0f} ({count / whole:.0%})" for count in row.weight_bytes)
        table.add_row(
            str(row.ranks), str(row.speculation), str(tokens), str(differing), f"{tokens / steps:.2f}", weights
        )
        total += differing
    return table, total


def main(
    prompts: Annotated[int, typer.Option(min=1, max=64)] = 32,
    max_tokens: Annotated[int, typer.Option(min=1)] = 32,
    ranks: Annotated[str, typer.Option(help="Comma-separated; each is compared with one device.")] = "2,3",
) -> None:
    """Compare the sizes."""
    rows: list[Row] = []
    console = Console()
    for size in (1, *map(int, ranks.split(","))):
        rows += asyncio.run(measure(size, all_prompts()[:prompts], max_tokens))
        console.log(f"{size} ranks: done")
    table, differing = report(rows)
    console.print(table)
    console.print(f"{differing} tokens differ")
    raise typer.Exit(1 if differing else 0)


if __name__ == "__main__":
    typer.run(main)
