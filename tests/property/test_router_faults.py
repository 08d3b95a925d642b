"""Whatever happens to frames, streams and replicas: the output is the plain one, and nothing is left in the pools."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.config import SpeculationConfig
from cluster.messages.request import Drafter, GenerateRequest
from cluster.messages.rounds import Close, Commit, Committed, DraftBlock, Refusal, SetDraftLimit, Submit
from cluster.router.observer import Outcome, RequestFinished, RequestStarted
from cluster.transport.loopback import NO_FAULTS, Faults
from tests.policies import default_only
from tests.toy_cluster import IMPATIENT, STEADY, ToyCluster, collect, request, right_output, tokens_of, toy_cluster

pytestmark = pytest.mark.property

ALL_BUT_OPEN = (Committed, Close, DraftBlock, Refusal)
SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def requests(seed: int, count: int = 5) -> list[GenerateRequest]:
    chance = random.Random(seed)
    return [
        request(
            f"r{number}",
            prompt=[chance.randrange(1, 50) for _ in range(chance.randint(1, 40))],
            max_tokens=chance.randint(1, 40),
            seed=chance.randrange(1 << 64),
            temperature=chance.choice((0.0, 1.0)),
            ignore_eos=chance.random() < 0.5,
        )
        for number in range(count)
    ]


def faulty(seed: int, level: float, **others: Any) -> Faults:
    return Faults(seed, level, level, level, level, max_turns=6, **others)


async def check(cluster: ToyCluster, items: Sequence[GenerateRequest]) -> None:
    """Run the requests together: no error, the right output each, and at the end nothing is held anywhere."""
    outputs = await asyncio.gather(*(collect(cluster.router, item) for item in items))
    for item, deltas in zip(items, outputs, strict=True):
        assert tokens_of(deltas) == right_output(item)
        assert deltas[-1].stats is not None
        assert deltas[-1].stats.completion_tokens == len(tokens_of(deltas))
    finished = cluster.observer.of(RequestFinished)
    assert len(finished) == len(cluster.observer.of(RequestStarted)) == len(items)
    assert {event.outcome for event in finished} <= {Outcome.STOP, Outcome.LENGTH}
    await let_pools_settle(cluster)


async def let_pools_settle(cluster: ToyCluster) -> None:
    """A faulty stream may lose an Abort or a Close; its end makes up for that."""
    assert all(status.num_requests == 0 for status in cluster.router.status().replicas)
    for host in cluster.hosts.values():
        await host.cut()
    await cluster.until(cluster.is_free)


@settings(SETTINGS, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    level=st.sampled_from([0.02, 0.1, 0.3]),
    agreement=st.sampled_from([0.0, 0.6, 1.0]),
    draft_len=st.integers(1, 8),
    close_after=st.none() | st.integers(1, 60),
    repeats=st.booleans(),
)
async def test_output_survives_any_fault_of_the_draft_streams(
    seed: int, level: float, agreement: float, draft_len: int, close_after: int | None, repeats: bool
) -> None:
    def prepare(cluster: ToyCluster) -> None:
        cluster.add_target(max_hold_s=0.002)
        for number in range(2):
            faults = faulty(seed + number, level, close_after=close_after)
            # A second copy of an Open that a replica has just refused would start a session that nobody owns.
            faults = replace(faults, only=ALL_BUT_OPEN) if repeats else replace(faults, duplicate=0.0)
            cluster.add_draft(faults, agreement=agreement)

    speculation = SpeculationConfig(max_draft_tokens=draft_len)
    async with toy_cluster(prepare=prepare, speculation=speculation, limits=STEADY) as cluster:
        await check(cluster, requests(seed))


@settings(SETTINGS, max_examples=25)
@given(seed=st.integers(0, 10**6), level=st.sampled_from([0.02, 0.1]), close_after=st.none() | st.integers(1, 80))
async def test_output_survives_any_fault_of_the_target_streams(
    seed: int, level: float, close_after: int | None
) -> None:
    def prepare(cluster: ToyCluster) -> None:
        for number in range(2):
            cluster.add_target(faulty(seed + number, level, close_after=close_after), max_hold_s=0.002)
        cluster.add_draft(faulty(seed + 7, level, only=ALL_BUT_OPEN), agreement=0.7)

    async with toy_cluster(prepare=prepare, limits=IMPATIENT) as cluster:
        await check(cluster, requests(seed, 3))


@settings(SETTINGS, max_examples=25)
@given(seed=st.integers(0, 10**6), drafter=st.sampled_from([Drafter.AUTO, Drafter.MODEL, Drafter.NGRAM]))
async def test_output_survives_replicas_that_die_and_come_back(seed: int, drafter: Drafter) -> None:
    chance = random.Random(seed)

    async def chaos(cluster: ToyCluster) -> None:
        while True:
            await asyncio.sleep(0.001 * chance.randint(0, 5))
            host = chance.choice(list(cluster.hosts.values()))
            await (cluster.kill(host) if chance.random() < 0.5 else host.cut())
            (cluster.add_target if "target" in host.info.replica_id else cluster.add_draft)()
            await cluster.router.refresh()

    async with toy_cluster(2, 2, speculation=SpeculationConfig(max_draft_tokens=4, drafter=drafter)) as cluster:
        trouble = asyncio.create_task(chaos(cluster))
        try:
            await check_outputs(cluster, requests(seed))
        finally:
            trouble.cancel()
            await asyncio.wait([trouble])
        await let_pools_settle(cluster)


@settings(SETTINGS, max_examples=25)
@given(seed=st.integers(0, 10**6), level=st.sampled_from([0.0, 0.1, 0.3]))
async def test_output_survives_any_change_of_policy_and_any_fault_of_the_limits_sent_for_it(
    seed: int, level: float
) -> None:
    chance = random.Random(seed)

    def prepare(cluster: ToyCluster) -> None:
        cluster.add_target(faulty(seed, level, only=(SetDraftLimit, DraftBlock)), max_hold_s=0.002)
        cluster.add_draft(agreement=0.7)

    async def change_policy(cluster: ToyCluster) -> None:
        for version in range(1, 10**6):
            settings = {"enabled": chance.random() < 0.6, "max_draft_tokens": chance.choice((1, 4, 9, 32))}
            drafter = chance.choice((Drafter.AUTO, Drafter.MODEL, Drafter.NGRAM))
            cluster.use(default_only(version, drafter=drafter, **settings))
            for _ in range(chance.randint(0, 20)):
                await asyncio.sleep(0)

    async with toy_cluster(prepare=prepare) as cluster:
        trouble = asyncio.create_task(change_policy(cluster))
        try:
            await check(cluster, requests(seed))
        finally:
            trouble.cancel()
            await asyncio.wait([trouble])


async def check_outputs(cluster: ToyCluster, items: Sequence[GenerateRequest]) -> None:
    outputs = await asyncio.gather(*(collect(cluster.router, item) for item in items))
    assert [tokens_of(deltas) for deltas in outputs] == [right_output(item) for item in items]


@settings(SETTINGS, max_examples=25)
@given(seed=st.integers(0, 10**6))
async def test_clients_that_leave_at_any_moment_leave_nothing_behind(seed: int) -> None:
    chance = random.Random(seed)

    async def leave_early(cluster: ToyCluster, item: GenerateRequest) -> tuple[int, ...]:
        stream = cluster.router.generate(item)
        patience = chance.randint(0, 10)
        deltas = []
        async for delta in stream:
            deltas.append(delta)
            if len(deltas) > patience:
                break
        await stream.aclose()
        return tokens_of(deltas)

    async def cancel_early(cluster: ToyCluster, item: GenerateRequest) -> None:
        task = asyncio.create_task(collect(cluster.router, item))
        for _ in range(chance.randint(0, 30)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    async with toy_cluster(1, 1) as cluster:
        items = requests(seed, 12)
        leavers = [leave_early(cluster, item) for item in items[:6]]
        outputs, *_ = await asyncio.gather(
            asyncio.gather(*leavers), *(cancel_early(cluster, item) for item in items[6:])
        )
        for item, output in zip(items[:6], outputs, strict=True):
            assert right_output(item)[: len(output)] == output
        assert cluster.router.status().models[0].num_requests == 0
        await cluster.until(cluster.is_free)  # on whole streams nothing needs their end


async def test_duplicated_and_late_frames_of_every_kind_cost_no_move() -> None:
    faults = Faults(3, duplicate=0.5, delay=0.2, max_turns=4, only=(Submit, Commit, Committed, Close))

    def prepare(cluster: ToyCluster) -> None:
        cluster.add_target(faults)
        cluster.add_draft(faults, NO_FAULTS)

    async with toy_cluster(prepare=prepare) as cluster:
        items = requests(11)
        await check_outputs(cluster, items)
        assert all(event.stats.num_resumes == 0 for event in cluster.observer.of(RequestFinished))
        await let_pools_settle(cluster)
