"""The `paceline` command. Each command imports what it needs, so that `paceline --help` is quick."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import typer
from rich.console import Console
from rich.table import Table

from cluster.config import ClusterConfig, ConfigError, PoolConfig, load_config
from cluster.messages import RequestError, SamplingParams, SpeculationOverride

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
models_app = typer.Typer(no_args_is_help=True, help="Fetch and list models.")
app.add_typer(models_app, name="models")
console = Console()
errors = Console(stderr=True)

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="Configuration file; default: the demo.")]
UrlOption = Annotated[str, typer.Option("--url", help="Base URL of a running Paceline.")]
DEFAULT_URL = "http://127.0.0.1:8000"


@app.callback()
def main() -> None:
    """Serve large language models with disaggregated speculative decoding."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("cluster").setLevel(logging.INFO)


@app.command()
def serve(config: ConfigOption = None) -> None:
    """Start a cluster on this machine (or join RAY_ADDRESS) and serve until interrupted."""
    settings = _load(config)
    _fetch_models(settings)
    from deployments.local_cluster import running

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    console.print("Starting Ray, the router and the pools …")
    with running(settings):
        _print_ready(settings)
        stop.wait()
        console.print("Draining and shutting down …")


@app.command()
def chat(
    url: UrlOption = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Default: the first model served.")] = None,
    max_tokens: int = 512,
    temperature: float = 0.7,
) -> None:
    """Talk to a running Paceline. Ctrl-D ends."""
    from openai import OpenAI, OpenAIError

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = []
    try:
        model = model or client.models.list().data[0].id
        while (line := _ask()) is not None:
            messages.append({"role": "user", "content": line})
            stream = client.chat.completions.create(
                model=model, messages=messages, max_tokens=max_tokens, temperature=temperature, stream=True
            )
            reply = ""
            for chunk in stream:
                text = (chunk.choices[0].delta.content or "") if chunk.choices else ""
                reply += text
                console.print(text, end="", markup=False, highlight=False)
            console.print()
            messages.append({"role": "assistant", "content": reply})
    except OpenAIError as error:
        _die(f"{url}: {error}")


@app.command()
def generate(
    prompt: str,
    config: ConfigOption = None,
    no_cluster: Annotated[bool, typer.Option("--no-cluster", help="Run the engines in this process.")] = False,
    url: UrlOption = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Default: the first model.")] = None,
    max_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    speculation: Annotated[bool, typer.Option("--speculation/--no-speculation")] = True,
) -> None:
    """Generate once from a chat prompt, through a running cluster or, with --no-cluster, in this process."""
    if no_cluster:
        sampling = SamplingParams(max_tokens, seed, temperature)
        _generate_here(_load(config), model, prompt, sampling, SpeculationOverride(enabled=speculation))
        return
    body = {
        "model": model or _first_model(url),
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stream": True,
        "speculation": {"enabled": speculation},
    }
    _stream_over_http(url, body)


@app.command()
def status(url: UrlOption = DEFAULT_URL, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Pools, replicas, KV use, and acceptance length of a running Paceline."""
    report = _get(f"{url}/status").json()
    if as_json:
        console.print_json(json.dumps(report))
        return
    table = Table("model", "pool", "replica", "running", "waiting", "KV used", "KV peak", "state")
    for replica in report["replicas"]:
        table.add_row(*_replica_row(replica))
    console.print(table)
    for item in report["models"]:
        console.print(
            f"{item['model']}: {item['num_requests']} requests in flight, "
            f"acceptance length {item['acceptance_length']:.2f} over {item['num_steps']} target steps"
        )


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Measure this machine: TPOT against transformers, time per round, speculation on and off (see --help)."""
    from load_tests.bench import app as bench_app

    bench_app(context.args, prog_name="paceline bench")


@models_app.command("fetch")
def models_fetch(name: str) -> None:
    """Download and convert a known model into the cache."""
    console.print(str(_resolve(name)), soft_wrap=True)


@models_app.command("list")
def models_list() -> None:
    """Known models and where they are."""
    from cluster.runtime.model_store import known_models

    table = Table("name", "state", "path")
    for item in known_models():
        table.add_row(item.name, "ready" if item.path else "not fetched", str(item.path or ""))
    console.print(table)


def _load(path: Path | None) -> ClusterConfig:
    try:
        return load_config(path)
    except ConfigError as error:
        _die(str(error))


def _fetch_models(config: ClusterConfig) -> None:
    pools: list[PoolConfig] = [pool for model in config.models for pool in (model.target, model.draft) if pool]
    for pool in pools:
        _check_ranks(_resolve(pool.path), pool.tensor_parallel)


def _check_ranks(path: Path, num_ranks: int) -> None:
    """Refuse early what every rank would refuse."""
    if num_ranks == 1:
        return
    from cluster.runtime.checkpoint import load_spec
    from cluster.runtime.model_spec import ModelError
    from cluster.runtime.sharding import check_shardable

    try:
        check_shardable(load_spec(path), num_ranks)
    except ModelError as error:
        _die(f"{path}: {error}")


def _resolve(name: str) -> Path:
    from cluster.runtime.fetch_progress import show_progress
    from cluster.runtime.model_spec import ModelError
    from cluster.runtime.model_store import resolve_model

    try:
        with show_progress(errors) as progress:
            return resolve_model(name, progress)
    except ModelError as error:
        _die(str(error))


def _generate_here(
    config: ClusterConfig, model: str | None, prompt: str, sampling: SamplingParams, speculation: SpeculationOverride
) -> None:
    names = [item.name for item in config.models]
    if model is not None and model not in names:
        _die(f"--model: {model!r} is not configured; there is {', '.join(names)}")
    _fetch_models(config)
    from cluster.router.local import generate_text

    try:
        asyncio.run(generate_text(config, model or names[0], prompt, sampling, speculation, _write))
    except RequestError as error:
        _die(error.message)
    _write("\n")


def _print_ready(config: ClusterConfig) -> None:
    router = config.router
    console.print(f"Ready. HTTP http://{router.host}:{router.http_port}/v1   gRPC {router.host}:{router.grpc_port}")
    console.print("Models: " + ", ".join(model.name for model in config.models) + ".   Ctrl-C stops.")


def _ask() -> str | None:
    try:
        return console.input("[bold]you>[/bold] ")
    except (EOFError, KeyboardInterrupt):
        return None


def _first_model(url: str) -> str:
    return str(_get(f"{url}/v1/models").json()["data"][0]["id"])


def _get(url: str) -> httpx.Response:
    try:
        return httpx.get(url, timeout=10).raise_for_status()
    except httpx.HTTPError as error:
        _die(f"no Paceline answers at {url}: {error}")


def _stream_over_http(url: str, body: dict[str, Any]) -> None:
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as response:
            if response.is_error:
                _die(json.loads(response.read())["error"]["message"])
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line[6:]).get("choices", [])
                    _write((choices[0]["delta"].get("content") or "") if choices else "")
        _write("\n")
    except httpx.HTTPError as error:
        _die(f"no Paceline answers at {url}: {error}")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _replica_row(replica: dict[str, Any]) -> list[str]:
    load = replica["load"]
    if load is None:
        return [replica["model"], replica["pool"], replica["replica_id"][:12], "", "", "", "", "connecting"]
    total = load["num_total_blocks"]
    used = total - load["num_free_blocks"]
    return [
        replica["model"],
        replica["pool"],
        replica["replica_id"][:12],
        str(load["num_running"]),
        str(load["num_waiting"]),
        f"{used}/{total} ({used / total:.0%})",
        f"{load['peak_used_blocks'] / total:.0%}",
        "draining" if load["draining"] else "ready",
    ]


def _die(message: str) -> NoReturn:
    errors.print(f"[red]error:[/red] {message}", highlight=False, soft_wrap=True)
    raise typer.Exit(1)
