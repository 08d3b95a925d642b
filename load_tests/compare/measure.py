"""Runs a scenario: every engine's server once, then rounds in which the engines take turns.

One server runs at a time. The others are frozen where they stand, so that a turn costs no start and takes no core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from load_tests.bench import free_port
from load_tests.compare.client import RequestFailedError, Trace, stream_completion
from load_tests.compare.figures import Figures
from load_tests.compare.guard import Guard, guarding
from load_tests.compare.peers.base import AbsentError, Arm, Conditions, Peer, PeerName, Say
from load_tests.compare.scenario import Load, Scenario
from load_tests.compare.server import Server, end_servers, start_server
from load_tests.compare.usage import Usage
from load_tests.compare.workload import Ask, Closed, run_workload

_WARM_UP_TOKENS = 8

Heldout = tuple[tuple[int, ...], ...]  # token ids of each prompt


@dataclass(slots=True)
class Results:
    """What has been measured so far: rounds by arm and load, texts by arm and prompt, why an arm is absent, notes."""

    rounds: dict[tuple[Arm, Load], list[Figures]] = field(default_factory=dict)
    texts: dict[tuple[Arm, tuple[int, ...]], str] = field(default_factory=dict)
    absent: dict[Arm, str] = field(default_factory=dict)
    notes: dict[Arm, str] = field(default_factory=dict)

    def add(self, arm: Arm, load: Load, asks: Sequence[Ask], traces: Sequence[Trace], usage: Usage) -> None:
        self.rounds.setdefault((arm, load), []).append(Figures.of(traces, usage))
        self.texts |= {(arm, ask.prompt_token_ids): trace.text for ask, trace in zip(asks, traces, strict=True)}

    def keep_complete_rounds(self, scenario: Scenario) -> None:
        """Those that every engine has finished that is not absent."""
        present = [arm for arm in scenario.arms if arm not in self.absent]
        complete = min((len(self.rounds.get((arm, load), ())) for arm in present for load in scenario.loads), default=0)
        self.rounds = {key: rounds[:complete] for key, rounds in self.rounds.items() if complete}

    def drop(self, arm: Arm, reason: str) -> None:
        """It can't be compared: what it did so far counts for nothing."""
        self.absent[arm] = reason
        self.rounds = {key: rounds for key, rounds in self.rounds.items() if key[0] != arm}


@dataclass(frozen=True, slots=True)
class Turn:
    """An arm that is present: its engine and the server that it uses."""

    arm: Arm
    peer: Peer
    server: Server

    async def send(self, ask: Ask) -> Trace:
        return await stream_completion(self.server.port, self.peer.body(self.arm, ask), ask.max_tokens)


@contextmanager
def measured(
    scenario: Scenario,
    conditions: Conditions,
    peers: Mapping[PeerName, Peer],
    heldout: Heldout,
    say: Say,
) -> Iterator[Results]:
    """What was found; the servers, frozen by then, end with the block. An interrupt keeps the complete rounds.

    Engines that cannot be had, started or used are in the results' `absent`.
    """
    results = Results()
    with ExitStack() as stack:
        try:
            turns = _present(scenario, conditions, peers, results, stack, say)
            for turn in turns:
                say(f"{turn.arm}: warming up")
                _guarded(turn, results, partial(_warm_up, scenario, heldout))
            for number in range(scenario.rounds):
                first = number % max(1, len(turns))
                for turn in turns[first:] + turns[:first]:
                    say(f"round {number + 1} of {scenario.rounds}: {turn.arm}")
                    _guarded(turn, results, partial(_take, scenario, number, heldout, conditions.cores, results))
        except KeyboardInterrupt:
            results.keep_complete_rounds(scenario)
        say("done")
        yield results


def start_once(scenario: Scenario, conditions: Conditions, peers: Mapping[PeerName, Peer], say: Say) -> dict[Arm, str]:
    """Make environments and weights, and start and end every server, so that all is cached. Returns who is absent."""
    results = Results()
    with ExitStack() as stack:
        _present(scenario, conditions, peers, results, stack, say)
    return results.absent


def _prepare(arms: Sequence[Arm], conditions: Conditions, peers: Mapping[PeerName, Peer], say: Say) -> dict[Arm, str]:
    """Make every engine's environment. Returns why arms are absent."""
    reasons: dict[PeerName, str] = {}
    for name in dict.fromkeys(arm.peer for arm in arms):
        try:
            peers[name].prepare(conditions, partial(_say_of, name, say))
        except AbsentError as error:
            reasons[name] = str(error)
    return {arm: reasons[arm.peer] for arm in arms if arm.peer in reasons}


def _present(
    scenario: Scenario,
    conditions: Conditions,
    peers: Mapping[PeerName, Peer],
    results: Results,
    stack: ExitStack,
    say: Say,
) -> list[Turn]:
    results.absent |= _prepare(scenario.arms, conditions, peers, say)
    guard = stack.enter_context(guarding())
    servers: dict[Arm, Server] = {}
    stack.callback(lambda: end_servers(servers.values()))
    turns = []
    for arm in scenario.arms:
        if arm in results.absent:
            continue
        peer = peers[arm.peer]
        owner = peer.server_of(arm)
        try:
            if owner not in servers:
                servers[owner] = _start(peer, owner, conditions, guard, results, say)
        except AbsentError as error:
            results.absent[arm] = str(error)
        else:
            turns.append(Turn(arm, peer, servers[owner]))
    return turns


def _start(peer: Peer, arm: Arm, conditions: Conditions, guard: Guard, results: Results, say: Say) -> Server:
    port = free_port()
    log = conditions.cache / arm.peer / f"{str(arm).replace(' ', '-')}.log"
    command = peer.command(arm, conditions, port)
    if command.note is not None:
        results.notes[arm] = command.note
    server = start_server(command, port, log, guard, partial(_say_of, str(arm), say))
    server.freeze()
    return server


def _guarded(turn: Turn, results: Results, work: Callable[[Turn], None]) -> None:
    if turn.arm in results.absent:
        return
    try:
        with turn.server.awake():
            work(turn)
    except RequestFailedError as error:
        results.drop(turn.arm, f"a request failed: {error}")
    except AbsentError as error:
        results.drop(turn.arm, str(error))


def _warm_up(scenario: Scenario, heldout: Heldout, turn: Turn) -> None:
    for load in scenario.loads:
        asks = [replace(ask, max_tokens=min(ask.max_tokens, _WARM_UP_TOKENS)) for ask in load.asks(-1, heldout)]
        asyncio.run(run_workload(asks, load.arrivals, turn.send))


def _take(
    scenario: Scenario, number: int, heldout: Heldout, cores: tuple[int, ...], results: Results, turn: Turn
) -> None:
    """One arm's part of a round, after a short request that finds caches, timers and connections awake."""
    wake = Ask(heldout[0], _WARM_UP_TOKENS)
    asyncio.run(run_workload([wake], Closed(1), turn.send))
    for load in scenario.loads:
        asks = load.asks(number, heldout)
        before = turn.server.cpu_times(cores)
        traces = asyncio.run(run_workload(asks, load.arrivals, turn.send))
        results.add(turn.arm, load, asks, traces, turn.server.usage_since(before, cores))


def _say_of(who: str, say: Say, line: str) -> None:
    say(f"{who}: {line}")
