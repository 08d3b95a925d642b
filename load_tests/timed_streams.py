"""Streams whose client notes when their tokens come: from a system in this process, or from one at a URL."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol
from uuid import uuid4

import httpx

from cluster.config import ClusterConfig, ModelConfig
from cluster.messages.request import GenerateRequest, SamplingParams, SpeculationOverride
from cluster.router.local import LocalSystem, load_local_model
from cluster.router.router import Router
from cluster.transport.caller import TENANT_HEADER

MODEL = "smollm2-135m"
_TOKEN_RANGE = (1_000, 40_000)  # ordinary tokens of the demo model's vocabulary


@dataclass(frozen=True, slots=True)
class Ask:
    """One greedy request."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    tenant: str = "default"
    speculate: bool = False


@dataclass(slots=True)
class Timed:
    """When a request was sent and when each part of its output came, by one monotonic clock, in seconds."""

    sent: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent

    def gaps(self) -> list[tuple[float, float]]:
        """(when, how long after the part before) of each part but the first."""
        return [(now, now - before) for before, now in zip(self.times, self.times[1:], strict=False)]


class Client(Protocol):
    """Runs requests; every item is a part of the output that has come."""

    def stream(self, ask: Ask) -> AsyncGenerator[None, None]: ...


class LocalClient:
    """Asks a router in this process."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def stream(self, ask: Ask) -> AsyncGenerator[None, None]:
        sampling = SamplingParams(ask.max_tokens, 0, temperature=0.0, ignore_eos=True)
        override = SpeculationOverride(enabled=ask.speculate)
        request = GenerateRequest(
            uuid4().hex, MODEL, ask.prompt_token_ids, sampling, tenant=ask.tenant, speculation=override
        )
        async with aclosing(self._router.generate(request)) as deltas:
            async for delta in deltas:
                if delta.token_ids:
                    yield


class HttpClient:
    """Asks the OpenAI-compatible API of a running system."""

    def __init__(self, http: httpx.AsyncClient, model: str = MODEL) -> None:
        self._http = http
        self._model = model

    async def stream(self, ask: Ask) -> AsyncGenerator[None, None]:
        body = {
            "model": self._model,
            "prompt": list(ask.prompt_token_ids),
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "speculation": {"enabled": ask.speculate},
        }
        headers = {TENANT_HEADER: ask.tenant}
        async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.is_error:
                raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if line.startswith("data: {") and _has_tokens(json.loads(line.removeprefix("data: "))):
                    yield


def _has_tokens(chunk: dict[str, Any]) -> bool:
    """Whether a chunk is a part of the output: not just the usage, or the end. Raises RuntimeError for an error."""
    if "error" in chunk:
        raise RuntimeError(str(chunk["error"]))
    return any(choice["text"] or choice["finish_reason"] is None for choice in chunk["choices"])


@asynccontextmanager
async def connected(url: str | None, model: ModelConfig) -> AsyncIterator[Client]:
    """A client of the system at `url`, or of one in this process that serves `model`."""
    if url is not None:
        async with httpx.AsyncClient(base_url=url, timeout=None) as http:
            yield HttpClient(http)
        return
    config = ClusterConfig(models=(model,))
    async with LocalSystem(config, {model.name: load_local_model(model, config)}) as system:
        yield LocalClient(system.router)


async def run_timed(client: Client, ask: Ask, timed: Timed) -> None:
    """Run a request to its end, noting times in `timed`."""
    async with aclosing(client.stream(ask)) as parts:
        async for _ in parts:
            timed.times.append(time.perf_counter())


def random_prompt(random: Random, num_tokens: int) -> tuple[int, ...]:
    """A prompt that shares its beginning with no other."""
    return tuple(random.randrange(*_TOKEN_RANGE) for _ in range(num_tokens))


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the sorted values lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
