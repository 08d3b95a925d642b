"""Speculation changes no token: every drafter, window, temperature and batch size against plain decoding, in float32.

    python -m load_tests.losslessness --prompts 64 --max-tokens 24 [--tensor-parallel 2] [--kv-blocks 24]

Runs the router and both engines in this process, further ranks of the target in processes of their own. Few KV blocks
force preemption wherever several requests run at a time. The baseline has one rank and ample KV. Exits with 1 if any
token differs.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cluster.config import ClusterConfig, DType, ModelConfig, PoolConfig, SpeculationConfig
from cluster.messages.request import (
    Drafter,
    DraftLengthMode,
    GenerateRequest,
    HoldMode,
    SamplingParams,
    SpeculationOverride,
)
from cluster.router.local import LocalModel, LocalSystem, load_local_model
from cluster.router.router import Router
from cluster.runtime.engine import Engine
from load_tests.prompts import all_prompts
from load_tests.random_draft import save_random_draft

MODEL = "smollm2-135m"
TEMPERATURES = ((0.0, 1.0), (0.7, 1.0), (1.0, 0.9))  # (temperature, top_p)
WINDOWS = (1, 2, 3, 5, 8)
BATCHES = (1, 8)
AMPLE_BLOCKS = 1024  # room for the largest batch


@dataclass(frozen=True, slots=True)
class Cell:
    """One drafter at one setting against plain decoding of the same prompts."""

    drafter: str
    max_draft_tokens: int
    temperature: float
    top_p: float
    batch: int
    tokens: int
    differing: int
    acceptance_length: float
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Setup:
    """What the target runs on, baseline aside."""

    tensor_parallel: int = 1
    kv_blocks: int = AMPLE_BLOCKS


@dataclass(frozen=True, slots=True)
class Output:
    token_ids: tuple[int, ...]
    num_steps: int


def pool(path: str, setup: Setup) -> PoolConfig:
    return PoolConfig(
        path=path,
        dtype=DType.FLOAT32,
        kv_blocks=setup.kv_blocks,
        max_model_len=2048,
        tensor_parallel=setup.tensor_parallel,
    )


def system_config(draft: str | None, setup: Setup) -> ClusterConfig:
    """Every round waits for its block, so that each verification has a full window."""
    drafts = None if draft is None else pool(draft, Setup())
    return ClusterConfig(
        models=(ModelConfig(name=MODEL, target=pool(MODEL, setup), draft=drafts),),
        speculation=SpeculationConfig(
            max_draft_tokens=max(WINDOWS),
            draft_length=DraftLengthMode.FIXED,
            hold=HoldMode.DEADLINE,
            max_hold_ms=10_000,
        ),
    )


def requests_for(
    router: Router, prompts: Sequence[str], sampling: SamplingParams, speculation: SpeculationOverride, label: str
) -> list[GenerateRequest]:
    """One request per prompt; the seed is the prompt's index."""
    tokenizer = router.tokenizer(MODEL)
    return [
        GenerateRequest(
            f"{label}-{index}",
            MODEL,
            tokenizer.apply_chat_template([{"role": "user", "content": prompt}]),
            replace(sampling, seed=index),
            speculation=speculation,
        )
        for index, prompt in enumerate(prompts)
    ]


async def run_all(router: Router, requests: Sequence[GenerateRequest], concurrency: int) -> list[Output]:
    """Outputs in the order of the requests, at most `concurrency` of them at a time."""
    gate = asyncio.Semaphore(concurrency)

    async def run(request: GenerateRequest) -> Output:
        async with gate:
            token_ids: list[int] = []
            num_steps = 0
            async with aclosing(router.generate(request)) as deltas:
                async for delta in deltas:
                    token_ids.extend(delta.token_ids)
                    num_steps = delta.stats.num_steps if delta.stats is not None else num_steps
            return Output(tuple(token_ids), num_steps)

    return list(await asyncio.gather(*map(run, requests)))


def num_differing(expected: Sequence[Output], actual: Sequence[Output]) -> int:
    """Positions at which the outputs differ, missing and surplus tokens counted."""
    return sum(
        abs(len(want.token_ids) - len(got.token_ids))
        + sum(a != b for a, b in zip(want.token_ids, got.token_ids, strict=False))
        for want, got in zip(expected, actual, strict=True)
    )


class Matrix:
    """Owns the baselines and the cells measured so far."""

    def __init__(self, prompts: Sequence[str], max_tokens: int, progress: Progress, num_cells: int) -> None:
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._progress = progress
        self._task = progress.add_task("losslessness", total=num_cells)
        self._baselines: dict[tuple[float, float], list[Output]] = {}
        self.cells: list[Cell] = []

    async def baseline(self, router: Router) -> None:
        """Plain decoding, one request at a time."""
        for temperature, top_p in TEMPERATURES:
            sampling = SamplingParams(self._max_tokens, 0, temperature, top_p)
            requests = requests_for(router, self._prompts, sampling, SpeculationOverride(enabled=False), "plain")
            self._baselines[temperature, top_p] = await run_all(router, requests, 1)

    async def measure(
        self, router: Router, target: Engine, name: str, drafter: Drafter, windows: Sequence[int]
    ) -> None:
        for temperature, top_p in TEMPERATURES:
            for window in windows:
                for batch in BATCHES:
                    sampling = SamplingParams(self._max_tokens, 0, temperature, top_p)
                    override = SpeculationOverride(True, window, drafter)
                    label = f"{name}-{window}-{temperature}-{batch}"
                    before = target.stats().num_preemptions
                    outputs = await run_all(
                        router, requests_for(router, self._prompts, sampling, override, label), batch
                    )
                    preemptions = target.stats().num_preemptions - before
                    self._record(Cell(name, window, temperature, top_p, batch, 0, 0, 0.0, preemptions), outputs)

    def _record(self, cell: Cell, outputs: Sequence[Output]) -> None:
        tokens = sum(len(output.token_ids) for output in outputs)
        steps = sum(output.num_steps for output in outputs)
        differing = num_differing(self._baselines[cell.temperature, cell.top_p], outputs)
        self.cells.append(replace(cell, tokens=tokens, differing=differing, acceptance_length=tokens / steps))
        self._progress.advance(self._task)
        self._progress.console.log(
            f"{cell.drafter} K={cell.max_draft_tokens} T={cell.temperature} top_p={cell.top_p} batch={cell.batch}: "
            f"{differing} of {tokens} tokens differ, acceptance length {tokens / steps:.2f}"
        )


async def run_matrix(
    prompts: Sequence[str], max_tokens: int, windows: Sequence[int], progress: Progress, setup: Setup | None = None
) -> list[Cell]:
    """All cells: n-gram and three draft models, each pool loaded in turn."""
    setup = setup or Setup()
    matrix = Matrix(prompts, max_tokens, progress, 4 * len(TEMPERATURES) * len(windows) * len(BATCHES))
    async with _running(None, Setup()) as (system, _):
        await matrix.baseline(system.router)
    with tempfile.TemporaryDirectory() as folder:
        drafts = {
            "demo draft": "smollm2-135m-draft",
            "draft = target": MODEL,
            "random draft": str(save_random_draft(Path(folder), MODEL)),
        }
        for name, path in drafts.items():
            async with _running(path, setup) as (system, target):
                if not matrix.cells:
                    await matrix.measure(system.router, target, "n-gram", Drafter.NGRAM, windows)
                await matrix.measure(system.router, target, name, Drafter.MODEL, windows)
    return matrix.cells


@asynccontextmanager
async def _running(draft: str | None, setup: Setup) -> AsyncIterator[tuple[LocalSystem, Engine]]:
    config = system_config(draft, setup)
    local: dict[str, LocalModel] = {MODEL: load_local_model(config.models[0], config)}
    async with LocalSystem(config, local) as system:
        yield system, local[MODEL].target


def summary(cells: Sequence[Cell]) -> Table:
    """A row per drafter and window: differing tokens and acceptance length at T=0, batch 1."""
    table = Table("drafter", "K", "tokens", "differing", "preemptions", "acceptance length (T=0, batch 1)")
    for name, window in dict.fromkeys((cell.drafter, cell.max_draft_tokens) for cell in cells):
        mine = [cell for cell in cells if (cell.drafter, cell.max_draft_tokens) == (name, window)]
        greedy = next(cell for cell in mine if cell.temperature == 0 and cell.batch == 1)
        table.add_row(
            name,
            str(window),
            str(sum(cell.tokens for cell in mine)),
            str(sum(cell.differing for cell in mine)),
            str(sum(cell.preemptions for cell in mine)),
            f"{greedy.acceptance_length:.2f}",
        )
    return table


def main(
    prompts: Annotated[int, typer.Option(min=1, max=64)] = 64,
    max_tokens: Annotated[int, typer.Option(min=1)] = 24,
    windows: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(map(str, WINDOWS)),
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Ranks of the target.")] = 1,
    kv_blocks: Annotated[int, typer.Option(min=1, help="Of the target; few force preemption.")] = AMPLE_BLOCKS,
    out: Annotated[Path | None, typer.Option(help="Write the cells as JSON.")] = None,
) -> None:
    """Run the matrix."""
    console = Console()
    with Progress(console=console) as progress:
        ks = [int(item) for item in windows.split(",")]
        cells = asyncio.run(
            run_matrix(all_prompts()[:prompts], max_tokens, ks, progress, Setup(tensor_parallel, kv_blocks))
        )
    console.print(summary(cells))
    total, differing = sum(cell.tokens for cell in cells), sum(cell.differing for cell in cells)
    console.print(f"{differing} of {total} tokens differ")
    if out is not None:
        rows: list[dict[str, Any]] = [asdict(cell) for cell in cells]
        out.write_text(json.dumps(rows, indent=1))
    raise typer.Exit(1 if differing else 0)


if __name__ == "__main__":
    typer.run(main)
