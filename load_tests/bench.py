"""Measure this machine through the whole cluster: HTTP and gRPC clients, router, two pools.

    paceline bench [--prompts 16] [--max-tokens 64] [--repeats 3] [--out FILE] [--trace FILE]

What is compared is run in turn, prompt by prompt, in the same minutes; what is reported are medians, ratios of medians
and the spread over prompts.
"""

from __future__ import annotations

import json
import os
import platform
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import grpc
import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cluster.config import ClusterConfig, DType, ModelConfig, PoolConfig, Quantization, RouterConfig, SpeculationConfig
from cluster.messages.request import DraftLengthMode, HoldMode
from cluster.runtime.model_store import resolve_model
from load_tests.prompts import heldout_prompts
from load_tests.spread import Spread
from load_tests.trace import ask_each, traced_processes
from load_tests.trace import report as report_trace
from protos.paceline.v1 import inference_pb2 as pb
from protos.paceline.v1 import inference_pb2_grpc

MODEL = "smollm2-135m"
NUM_THREADS = 2
# Below the kernel's range for outgoing connections, which come and go while a server starts; above what `paceline
# serve` chooses from for itself.
_PORTS = cycle(random.SystemRandom().sample(range(30_000, 32_768), 2_768))

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Run:
    """One request as its client saw it."""

    tpot_s: float
    ttft_s: float
    num_tokens: int
    acceptance_length: float = 1.0


@dataclass(frozen=True, slots=True)
class Report:
    """What one run of the benchmark found. Times in milliseconds."""

    machine: str
    prompts: int
    max_tokens: int
    plain_tpot_ms: Spread
    transformers_tpot_ms: Spread | None
    tpot_ratio_to_transformers: Spread | None
    draft_tpot_ms: Spread
    tpot_ratio_draft_to_plain: Spread
    acceptance_length: float
    ngram_tpot_ms: Spread
    tpot_ratio_ngram_to_plain: Spread
    ngram_acceptance_length: float
    round_overhead_ms: Spread
    ttft_ms: Spread


def bench_config(max_draft_tokens: int, dtype: DType) -> ClusterConfig:
    """The demo with a fixed window whose rounds all wait for their block, so that a round is a round.

    Every arm reads each prompt itself: what is compared must not depend on which of them came first.
    """
    pool: dict[str, Any] = {"dtype": dtype, "kv_blocks": 2048, "prefix_cache": False}
    return ClusterConfig(
        models=(
            ModelConfig(
                name=MODEL,
                target=PoolConfig(path=MODEL, num_threads=NUM_THREADS, **pool),
                draft=PoolConfig(
                    path="smollm2-135m-draft", num_threads=NUM_THREADS, quantization=Quantization.INT8, **pool
                ),
            ),
        ),
        speculation=SpeculationConfig(
            max_draft_tokens=max_draft_tokens, draft_length=DraftLengthMode.FIXED, hold=HoldMode.DEADLINE
        ),
        router=RouterConfig(http_port=free_port(), grpc_port=free_port()),
    )


def ask(
    stub: Any,
    token_ids: Sequence[int],
    max_tokens: int,
    drafter: str | None,
    on_response: Callable[[pb.GenerateResponse], None] = lambda _: None,
) -> Run:
    """One greedy request over gRPC; `drafter` None decodes plainly."""
    speculation = pb.Speculation(enabled=False) if drafter is None else pb.Speculation(enabled=True, drafter=drafter)
    request = pb.GenerateRequest(
        model=MODEL,
        token_ids=pb.TokenIds(ids=token_ids),
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        speculation=speculation,
    )
    began = time.perf_counter()
    times: list[float] = []
    for response in stub.Generate(request):
        on_response(response)
        if response.token_ids:
            times.append(time.perf_counter())
        usage = response.usage
    num_first = 1  # the target's first commit is one token
    tpot_s = (times[-1] - times[0]) / (usage.completion_tokens - num_first)
    return Run(tpot_s, times[0] - began, usage.completion_tokens, usage.acceptance_length)


@contextmanager
def transformers_peer(dtype: DType) -> Iterator[Callable[[Sequence[int], int], float]]:
    """A function that times transformers' generate on a prompt; its process ends with the context."""
    command = [sys.executable, "-m", "load_tests.transformers_peer", str(resolve_model(MODEL)), dtype, str(NUM_THREADS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def tpot_s(token_ids: Sequence[int], max_tokens: int) -> float:
            process.stdin.write(json.dumps({"token_ids": list(token_ids), "max_tokens": max_tokens}) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            return float(json.loads(process.stdout.readline())["tpot_s"])  # type: ignore[union-attr]

        yield tpot_s
        process.stdin.close()


def measure(
    arms: Mapping[str, Callable[[Sequence[int]], Run]], prompts: Sequence[Sequence[int]], repeats: int
) -> dict[str, list[Run]]:
    """Every arm on every prompt in turn, after one unrecorded round: the median run of each prompt, by arm."""
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=len(prompts) * repeats * len(arms))
        for arm in arms.values():
            arm(prompts[0])
        for token_ids in prompts:
            taken: dict[str, list[Run]] = {name: [] for name in arms}
            for _ in range(repeats):
                for name, arm in arms.items():
                    taken[name].append(arm(token_ids))
                    progress.advance(task)
            for name, tries in taken.items():
                runs[name].append(sorted(tries, key=lambda run: run.tpot_s)[len(tries) // 2])
    return runs


def round_overheads_ms(url: str) -> Spread:
    """Time that a round spent outside draft and target, from the router's histogram."""
    buckets: list[tuple[float, float]] = []
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=10).text):
        if family.name == "paceline_round_overhead_seconds":
            buckets = [
                (float(s.labels["le"]), s.value)
                for s in family.samples
                if s.labels.get("drafter") == "model" and "le" in s.labels
            ]
    return Spread(*(1e3 * _quantile(buckets, q) for q in (0.1, 0.5, 0.9)))


def _quantile(buckets: Sequence[tuple[float, float]], q: float) -> float:
    """Linear interpolation inside the bucket, as Prometheus' histogram_quantile does."""
    rank, lower, below = q * buckets[-1][1], 0.0, 0.0
    for upper, count in buckets:
        if count >= rank and count > below:
            return lower + (upper - lower) * (rank - below) / (count - below)
        lower, below = upper, count
    return lower


@app.command()
def bench(
    prompts: Annotated[int, typer.Option(min=1, max=48, help="Of the 48 held-out prompts.")] = 48,
    max_tokens: Annotated[int, typer.Option(min=8)] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per prompt; the median counts.")] = 3,
    max_draft_tokens: Annotated[int, typer.Option("--draft-tokens", "-k", min=1, max=32)] = 4,
    dtype: DType = DType.BFLOAT16,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Also time transformers' generate.")] = True,
    out: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Only trace rounds with the draft model: a table, FILE.svg, and FILE.json for Perfetto."),
    ] = None,
) -> None:
    """Plain decoding against transformers, speculation against plain decoding, and the time a round adds."""
    config = bench_config(max_draft_tokens, dtype)
    router = config.router
    console = Console()
    if trace is not None:
        _trace(config, prompts, max_tokens, trace, console)
        return
    with _served(config, console) as stub:
        token_ids = [_chat_tokens(stub, prompt) for prompt in heldout_prompts()[:prompts]]
        report = _run(stub, f"http://127.0.0.1:{router.http_port}", token_ids, max_tokens, repeats, dtype, peers)
    console.print(_table(report))
    if out is not None:
        out.write_text(json.dumps(asdict(report), indent=1))


@contextmanager
def _served(config: ClusterConfig, console: Console) -> Iterator[Any]:
    """A stub of a cluster that runs in the context."""
    from deployments.local_cluster import running

    console.print("Starting a cluster …")
    with running(config), grpc.insecure_channel(f"127.0.0.1:{config.router.grpc_port}") as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]


def _trace(config: ClusterConfig, prompts: int, max_tokens: int, out: Path, console: Console) -> None:
    with traced_processes() as folder:
        with _served(config, console) as stub:
            token_ids = [_chat_tokens(stub, prompt) for prompt in heldout_prompts()[:prompts]]
            client = ask_each(lambda ids, received: ask(stub, ids, max_tokens, "model", received), token_ids)
        report_trace(folder, client, out, console)


def _run(
    stub: Any, url: str, prompts: Sequence[Sequence[int]], max_tokens: int, repeats: int, dtype: DType, peers: bool
) -> Report:
    arms: dict[str, Callable[[Sequence[int]], Run]] = {
        "plain": lambda ids: ask(stub, ids, max_tokens, None),
        "draft": lambda ids: ask(stub, ids, max_tokens, "model"),
        "ngram": lambda ids: ask(stub, ids, max_tokens, "ngram"),
    }
    runs = measure(arms, prompts, repeats)
    versus: dict[str, list[Run]] = {}
    if peers:
        with transformers_peer(dtype) as tpot_s:
            pair: dict[str, Callable[[Sequence[int]], Run]] = {
                "transformers": lambda ids: Run(tpot_s(ids, max_tokens), 0.0, max_tokens),
                "plain": arms["plain"],
            }
            versus = measure(pair, prompts[: max(4, len(prompts) // 4)], repeats)
    return Report(
        machine=f"{platform.machine()}, {os.cpu_count()} cores, {NUM_THREADS} threads, {dtype}",
        prompts=len(prompts),
        max_tokens=max_tokens,
        plain_tpot_ms=_tpot_ms(runs["plain"]),
        transformers_tpot_ms=_tpot_ms(versus["transformers"]) if versus else None,
        tpot_ratio_to_transformers=_ratio(versus["plain"], versus["transformers"]) if versus else None,
        draft_tpot_ms=_tpot_ms(runs["draft"]),
        tpot_ratio_draft_to_plain=_ratio(runs["draft"], runs["plain"]),
        acceptance_length=_acceptance_length(runs["draft"]),
        ngram_tpot_ms=_tpot_ms(runs["ngram"]),
        tpot_ratio_ngram_to_plain=_ratio(runs["ngram"], runs["plain"]),
        ngram_acceptance_length=_acceptance_length(runs["ngram"]),
        round_overhead_ms=round_overheads_ms(url),
        ttft_ms=Spread.of([1e3 * run.ttft_s for run in runs["plain"]]),
    )


def _tpot_ms(runs: Sequence[Run]) -> Spread:
    return Spread.of([1e3 * run.tpot_s for run in runs])


def _ratio(runs: Sequence[Run], base: Sequence[Run]) -> Spread:
    """Of TPOT, prompt by prompt."""
    return Spread.of([run.tpot_s / other.tpot_s for run, other in zip(runs, base, strict=True)])


def _acceptance_length(runs: Sequence[Run]) -> float:
    """Tokens per target step over all prompts."""
    return sum(run.num_tokens for run in runs) / sum(run.num_tokens / run.acceptance_length for run in runs)


def _chat_tokens(stub: Any, prompt: str) -> list[int]:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=prompt)])
    return list(stub.Tokenize(pb.TokenizeRequest(model=MODEL, chat=chat)).token_ids)


def _table(report: Report) -> Table:
    title = f"{report.prompts} prompts × {report.max_tokens} tokens, greedy, 1 stream; {report.machine}"
    table = Table("figure", "median [P10, P90] over prompts", title=title)
    for name, value in asdict(report).items():
        if isinstance(value, dict):
            table.add_row(name, str(Spread(**value)))
        elif isinstance(value, float):
            table.add_row(name, f"{value:.2f}")
    return table


def free_port() -> int:
    """A port of this machine that nobody listens on; another one each time."""
    while True:
        port = next(_PORTS)
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port


if __name__ == "__main__":
    app()
