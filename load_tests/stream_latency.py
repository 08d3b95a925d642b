"""How long one hop between a router and a pool replica takes: `python -m load_tests.stream_latency`.

A router's stream in this process, a replica's server in another, and behind it an engine thread that answers each
proposal with a commit. One ping goes through everything that a draft/verify round does, except a model:

    send → codec → outbox → gRPC → codec → hub → engine thread
    publish → event loop → codec → outbox → gRPC → codec → sink

Both processes read the same monotonic clock, so the two hops are timed apart as well.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe

from cluster.messages.request import SamplingParams
from cluster.messages.rounds import Commit, DraftBlock, StepTimings, Submit, TargetCommand, TargetEvent
from cluster.transport.hub import PoolHub
from cluster.transport.server import PoolServer
from cluster.transport.target_stream import TARGET_PROTOCOL, GrpcTargetStream

PROMPT_LEN = 64
NUM_GUESSES = 5
CONNECT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds."""

    p50: float
    p95: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Percentiles:
        ordered = sorted(seconds)
        return Percentiles(ordered[len(ordered) // 2] * 1e3, ordered[len(ordered) * 95 // 100] * 1e3)


@dataclass(frozen=True, slots=True)
class StreamLatency:
    """What one run measured, over `num_pings` rounds of `num_requests` requests at a time."""

    num_pings: int
    num_requests: int
    round_trip: Percentiles
    command_hop: Percentiles  # send() → the engine thread has the command
    event_hop: Percentiles  # the engine thread publishes → the sink is called


class EchoEngine:
    """Owns a thread that answers each batch of proposals with a batch of commits."""

    def __init__(self, hub: PoolHub[TargetCommand, TargetEvent]) -> None:
        self._hub = hub
        self._commands: queue.SimpleQueue[Sequence[TargetCommand] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="echo-engine", daemon=True)
        self._thread.start()

    def handle(self, commands: Sequence[TargetCommand], /) -> None:
        self._commands.put(commands)

    def stop(self) -> None:
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (commands := self._commands.get()) is not None:
            arrived = StepTimings(step_s=time.monotonic())
            blocks = [command for command in commands if isinstance(command, DraftBlock)]
            self._hub.publish(
                [Commit(block.request_id, block.committed_len, block.token_ids, timings=arrived) for block in blocks]
            )


def serve_echo(pipe: Pipe) -> None:
    """The replica's process: sends its address, stops on the answer."""
    asyncio.run(_serve_echo(pipe))


async def _serve_echo(pipe: Pipe) -> None:
    hub = PoolHub(TARGET_PROTOCOL)
    engine = EchoEngine(hub)
    hub.bind(engine)
    server = PoolServer(hub)
    await server.start()
    pipe.send(server.address)
    await asyncio.to_thread(pipe.recv)
    await server.stop()
    engine.stop()


class Pinger:
    """Owns one router's stream and the clock readings of the pings on it."""

    def __init__(self, stream: GrpcTargetStream) -> None:
        self._stream = stream
        self.round_trips: list[float] = []
        self.command_hops: list[float] = []
        self.event_hops: list[float] = []

    async def ping(self, request_ids: Sequence[str], committed_len: int) -> None:
        """One proposal per request, in one turn of the loop; returns when every commit is back."""
        waiting = set(request_ids)
        done = asyncio.get_running_loop().create_future()
        sent = time.monotonic()

        def sink(event: TargetEvent) -> None:
            now = time.monotonic()
            if isinstance(event, Commit):
                self.round_trips.append(now - sent)
                self.command_hops.append(event.timings.step_s - sent)
                self.event_hops.append(now - event.timings.step_s)
                waiting.discard(event.request_id)
                if not waiting:
                    done.set_result(None)

        for request_id in request_ids:
            self._stream.subscribe(request_id, sink)
            self._stream.send(DraftBlock(request_id, committed_len, tuple(range(NUM_GUESSES))))
        await done


async def measure(address: str, num_pings: int, num_requests: int) -> StreamLatency:
    """Ping a replica that serve_echo runs."""
    stream = GrpcTargetStream(address)
    await stream.connected(CONNECT_TIMEOUT_S)
    request_ids = [f"ping-{index}" for index in range(num_requests)]
    for request_id in request_ids:
        stream.send(Submit(request_id, tuple(range(PROMPT_LEN)), SamplingParams(max_tokens=1, seed=0)))
    warm_up = Pinger(stream)
    for index in range(max(1, num_pings // 10)):
        await warm_up.ping(request_ids, PROMPT_LEN + index)
    pinger = Pinger(stream)
    for index in range(num_pings):
        await pinger.ping(request_ids, PROMPT_LEN + index)
    await stream.close()
    return StreamLatency(
        num_pings,
        num_requests,
        Percentiles.of(pinger.round_trips),
        Percentiles.of(pinger.command_hops),
        Percentiles.of(pinger.event_hops),
    )


def run(num_pings: int = 2000, num_requests: int = 1) -> StreamLatency:
    """Start a replica in a process of its own, ping it, stop it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_echo, args=(theirs,))
    process.start()
    try:
        return asyncio.run(measure(ours.recv(), num_pings, num_requests))
    finally:
        ours.send(None)
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pings", type=int, default=2000)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    arguments = parser.parse_args()
    print(f"{'requests':>8} {'':>14} {'p50 ms':>8} {'p95 ms':>8}")
    for num_requests in arguments.requests:
        latency = run(arguments.pings, num_requests)
        for name in ("round_trip", "command_hop", "event_hop"):
            percentiles: Percentiles = getattr(latency, name)
            print(f"{num_requests:>8} {name:>14} {percentiles.p50:>8.3f} {percentiles.p95:>8.3f}")


if __name__ == "__main__":
    main()
