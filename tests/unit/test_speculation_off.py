"""Speculation that is switched off leaves nothing behind: the same work as in a system that was built without it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cluster.config import SpeculationConfig
from cluster.core.step import StepStats
from cluster.messages.rounds import Submit
from cluster.router.observer import FellBack, ProposalForwarded
from cluster.router.replica_set import Pool
from tests.policies import policy
from tests.toy_cluster import ToyCluster, collect, request, tokens_of, toy_cluster

pytestmark = pytest.mark.unit

OFF = policy(version=7, kill={"all": True})


@dataclass
class Work:
    """All that a cluster did for a few requests, one after the other."""

    to_target: list[Any] = field(default_factory=list)
    to_draft: list[Any] = field(default_factory=list)
    steps: list[StepStats] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)

    def watch(self, cluster: ToyCluster) -> None:
        """Note every command that the router sends from now on, and every target step."""
        for host in cluster.hosts.values():
            sent = self.to_draft if host.info.pool is Pool.DRAFT else self.to_target
            for stream in host.streams:
                stream.send = noting(stream.send, sent)  # type: ignore[method-assign]
            if host.info.pool is Pool.TARGET:
                host.pool.engine.on_step = self.steps.append

    async def run(self, cluster: ToyCluster) -> None:
        for number in range(4):
            item = request(f"r{number}", prompt=(3, 1, number), max_tokens=30, temperature=number % 2, seed=number)
            self.outputs.append(tokens_of(await collect(cluster.router, item)))
            await cluster.until(cluster.is_free)

    def shapes(self) -> list[tuple[int, int, int]]:
        """Of each step: its rows, guesses and tokens."""
        return [(step.num_scheduled_tokens, step.num_draft_tokens, step.num_emitted_tokens) for step in self.steps]


def noting(send: Any, sent: list[Any]) -> Any:
    def noted(command: Any) -> None:
        sent.append(command)
        send(command)

    return noted


def timeless(commands: list[Submit]) -> list[Submit]:
    """Without the time that a deadline has left."""
    return [replace(command, deadline_s=None) for command in commands]


async def work_without() -> Work:
    work = Work()
    async with toy_cluster(1, 0, speculation=SpeculationConfig(enabled=False)) as cluster:
        work.watch(cluster)
        await work.run(cluster)
    return work


async def test_the_kill_switch_leaves_the_work_of_a_system_without_speculation() -> None:
    without, off = await work_without(), Work()
    async with toy_cluster(1, 1) as cluster:
        cluster.use(OFF)
        off.watch(cluster)
        await off.run(cluster)
        assert not cluster.observer.of(ProposalForwarded)
        assert not cluster.observer.of(FellBack)
    assert not any(off.steps[-1].scheduler.holds.values())
    assert off.to_draft == []
    assert [command for command in off.to_target if not isinstance(command, Submit)] == []
    assert {command.max_draft_tokens for command in off.to_target} == {0}
    assert timeless(off.to_target) == timeless(without.to_target)
    assert off.shapes() == without.shapes()
    assert off.outputs == without.outputs


async def test_the_same_system_with_speculation_on_would_not_pass_for_one_without() -> None:
    without, on = await work_without(), Work()
    async with toy_cluster(1, 1) as cluster:
        on.watch(cluster)
        await on.run(cluster)
        assert cluster.observer.of(ProposalForwarded)
    assert on.to_draft
    assert on.shapes() != without.shapes()
    assert any(on.steps[-1].scheduler.holds.values())
    assert on.outputs == without.outputs
