"""What is asked, and when: the same for every engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from load_tests.compare.client import Trace


@dataclass(frozen=True, slots=True)
class Ask:
    """One greedy request for exactly `max_tokens` tokens, whatever the model would like."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Closed:
    """`streams` clients that each send their next request when the one before has ended."""

    streams: int

    def __str__(self) -> str:
        return "1 stream" if self.streams == 1 else f"{self.streams} streams"


@dataclass(frozen=True, slots=True)
class Poisson:
    """An open loop: requests come at `rate` per second on average, however many are running."""

    rate: float
    seed: int = 0

    def offsets_s(self, count: int) -> tuple[float, ...]:
        """When each of `count` requests is sent, in seconds from the start; a function of the fields alone."""
        random, now, offsets = Random(self.seed), 0.0, []
        for _ in range(count):
            offsets.append(now)
            now += random.expovariate(self.rate)
        return tuple(offsets)

    def __str__(self) -> str:
        return f"Poisson, {self.rate:g}/s"


Arrivals = Closed | Poisson
Send = Callable[[Ask], Awaitable[Trace]]


async def run_workload(asks: Sequence[Ask], arrivals: Arrivals, send: Send) -> list[Trace]:
    """The trace of each ask, in their order. Raises what `send` raises first, and ends the others."""
    numbered = iter(enumerate(asks))
    if isinstance(arrivals, Poisson):
        workers = [
            _send_after(offset, item, send)
            for offset, item in zip(arrivals.offsets_s(len(asks)), numbered, strict=True)
        ]
    else:
        workers = [_send_in_turn(numbered, send) for _ in range(arrivals.streams)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(worker) for worker in workers]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    traces = dict(pair for task in tasks for pair in task.result())
    return [traces[number] for number in range(len(asks))]


async def _send_after(delay_s: float, item: tuple[int, Ask], send: Send) -> list[tuple[int, Trace]]:
    await asyncio.sleep(delay_s)
    return [(item[0], await send(item[1]))]


async def _send_in_turn(waiting: Iterator[tuple[int, Ask]], send: Send) -> list[tuple[int, Trace]]:
    return [(number, await send(ask)) for number, ask in waiting]
