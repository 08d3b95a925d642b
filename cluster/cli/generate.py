"""`paceline generate`."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import httpx
import typer

from cluster.cli.client import DEFAULT_URL, ApiKeyOption, UrlOption, ask, bearer, calling, check
from cluster.cli.common import ConfigOption, die, load, write
from cluster.cli.fetching import fetch_models
from cluster.config import ClusterConfig
from cluster.messages.answer import RequestError
from cluster.messages.request import SamplingParams, SpeculationOverride


def generate(
    prompt: str,
    config: ConfigOption = None,
    no_cluster: Annotated[bool, typer.Option("--no-cluster", help="Run the engines in this process.")] = False,
    url: UrlOption = DEFAULT_URL,
    api_key: ApiKeyOption = None,
    model: Annotated[str | None, typer.Option(help="Default: the first model.")] = None,
    max_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    speculation: Annotated[bool, typer.Option("--speculation/--no-speculation")] = True,
) -> None:
    """Generate once from a chat prompt, through a running cluster or, with --no-cluster, in this process."""
    if no_cluster:
        sampling = SamplingParams(max_tokens, seed, temperature)
        _generate_here(load(config), model, prompt, sampling, SpeculationOverride(enabled=speculation))
        return
    body = {
        "model": model or _first_model(url, api_key),
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stream": True,
        "speculation": {"enabled": speculation},
    }
    _stream_over_http(url, api_key, body)


def _generate_here(
    config: ClusterConfig, model: str | None, prompt: str, sampling: SamplingParams, speculation: SpeculationOverride
) -> None:
    names = [item.name for item in config.models]
    if model is not None and model not in names:
        die(f"--model: {model!r} is not configured; there is {', '.join(names)}")
    fetch_models(config)
    from cluster.router.local import generate_text

    try:
        asyncio.run(generate_text(config, model or names[0], prompt, sampling, speculation, write))
    except RequestError as error:
        die(error.message)
    write("\n")


def _first_model(url: str, api_key: str | None) -> str:
    return str(ask("GET", f"{url}/v1/models", api_key)["data"][0]["id"])


def _stream_over_http(url: str, api_key: str | None, body: dict[str, Any]) -> None:
    path, headers = f"{url}/v1/chat/completions", bearer(api_key)
    with calling(url), httpx.stream("POST", path, json=body, headers=headers, timeout=600) as response:
        if response.is_error:
            response.read()
            check(response)
        for line in response.iter_lines():
            if line.startswith("data: {"):
                _write_event(json.loads(line[6:]))
    write("\n")


def _write_event(event: dict[str, Any]) -> None:
    if "error" in event:
        die(event["error"]["message"])
    choices = event.get("choices", [])
    write((choices[0]["delta"].get("content") or "") if choices else "")
