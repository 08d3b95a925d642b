"""How the router follows its policy: what running requests do when it is replaced, and what is said about it."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from cluster.config import SpeculationConfig
from cluster.control.document import DocumentError
from cluster.core.speculation import FallbackCause
from cluster.messages.answer import PolicyStamp, TokenDelta
from cluster.messages.request import Drafter
from cluster.messages.rounds import Committed, DraftBlock, Open, SetDraftLimit
from cluster.router.observer import FellBack, PolicyApplied, ProposalForwarded, RequestFinished
from cluster.router.replica_set import Pool
from cluster.router.request_log import REQUEST_LOGGER
from tests.policies import default_only, default_settings, policy
from tests.toy_cluster import FOREVER_S, Host, ToyCluster, collect, request, right_output, tokens_of, toy_cluster

pytestmark = pytest.mark.unit

NUM_STREAMS = 32
OFF = policy(version=7, kill={"all": True})
ON = default_only(version=8, max_draft_tokens=4)


def sent_to(*hosts: Host) -> list[Any]:
    """Every command that the router sends on the hosts' streams from now on, in order."""
    sent: list[Any] = []
    for host in hosts:
        for stream in host.streams:
            stream.send = record(stream.send, sent)  # type: ignore[method-assign]
    return sent


def record(send: Any, sent: list[Any]) -> Any:
    def recorded(command: Any) -> None:
        sent.append(command)
        send(command)

    return recorded


def proposals(commands: list[Any]) -> list[DraftBlock]:
    return [command for command in commands if isinstance(command, DraftBlock) and command.token_ids]


class Stream:
    """One running request and what it has given so far."""

    def __init__(self, cluster: ToyCluster, request_id: str, **fields: Any) -> None:
        self.item = request(request_id, max_tokens=100, **fields)
        self.deltas: list[TokenDelta] = []
        self.task = asyncio.create_task(self._run(cluster))

    async def _run(self, cluster: ToyCluster) -> None:
        async for delta in cluster.router.generate(self.item):
            self.deltas.append(delta)

    @property
    def policy(self) -> PolicyStamp:
        assert self.deltas[-1].policy is not None
        return self.deltas[-1].policy


async def finish(cluster: ToyCluster, streams: list[Stream]) -> None:
    """Every stream ends by itself, with the text that it would have had without any guess."""
    await asyncio.gather(*(stream.task for stream in streams))
    for stream in streams:
        assert tokens_of(stream.deltas) == right_output(stream.item)
    assert not [event for event in cluster.observer.of(RequestFinished) if event.outcome.value != "length"]
    await cluster.until(cluster.is_free)


def targets(cluster: ToyCluster) -> list[Host]:
    return [host for host in cluster.hosts.values() if host.info.pool is Pool.TARGET]


def drafts(cluster: ToyCluster) -> list[Host]:
    return [host for host in cluster.hosts.values() if host.info.pool is Pool.DRAFT]


async def test_the_kill_switch_stops_every_proposal_of_32_live_streams_at_once() -> None:
    def prepare(cluster: ToyCluster) -> None:
        for _ in range(2):
            cluster.add_draft(agreement=0.3)  # so that streams are long

    async with toy_cluster(4, 0, prepare=prepare) as cluster:
        streams = [Stream(cluster, f"r{i}", temperature=i % 2, seed=i) for i in range(NUM_STREAMS)]
        await cluster.until(lambda: all(len(stream.deltas) > 3 for stream in streams))
        before = sent_to(*targets(cluster))
        await cluster.until(lambda: len(proposals(before)) > NUM_STREAMS)
        assert not any(stream.task.done() for stream in streams)
        after = sent_to(*targets(cluster))
        cluster.use(OFF)
        limits = [command for command in after if isinstance(command, SetDraftLimit)]
        assert sorted(limit.request_id for limit in limits) == sorted(stream.item.request_id for stream in streams)
        assert {limit.max_draft_tokens for limit in limits} == {0}
        await finish(cluster, streams)
        assert proposals(after) == []
        assert {stream.policy for stream in streams} == {PolicyStamp(7, "off", "killed")}
        assert cluster.observer.of(PolicyApplied) == [PolicyApplied(7, NUM_STREAMS)]


async def test_the_kill_switch_turned_back_opens_draft_sessions_of_live_streams_at_once() -> None:
    async with toy_cluster(4, 2) as cluster:
        cluster.use(OFF)
        streams = [Stream(cluster, f"r{i}", seed=i) for i in range(NUM_STREAMS)]
        await cluster.until(lambda: all(len(stream.deltas) > 3 for stream in streams))
        to_targets = sent_to(*targets(cluster))
        to_drafts = sent_to(*drafts(cluster))
        cluster.use(ON)
        assert len([command for command in to_drafts if isinstance(command, Open)]) == NUM_STREAMS
        assert [command.max_draft_tokens for command in to_targets if isinstance(command, SetDraftLimit)] == [
            4
        ] * NUM_STREAMS
        await finish(cluster, streams)
        assert {command.request_id for command in proposals(to_targets)} == {s.item.request_id for s in streams}
        assert {stream.policy for stream in streams} == {PolicyStamp(8, "default", "default")}


async def test_a_target_that_waits_for_a_block_is_told_that_none_will_come() -> None:
    def prepare(cluster: ToyCluster) -> None:
        cluster.add_target(max_hold_s=FOREVER_S)

    async with toy_cluster(0, 1, prepare=prepare) as cluster:
        (draft,) = drafts(cluster)
        to_draft, to_target = sent_to(draft), sent_to(*targets(cluster))

        def is_waiting() -> bool:
            asked = [command for command in to_draft if isinstance(command, Committed) and command.draft_len]
            return len(asked) > 3 and len(asked) > len([item for item in to_target if isinstance(item, DraftBlock)])

        stream = Stream(cluster, "r")
        await cluster.until(is_waiting)
        draft.is_hung = True
        told = sent_to(*targets(cluster))
        cluster.use(OFF)
        assert [type(command) for command in told] == [SetDraftLimit, DraftBlock]
        assert told[1].token_ids == ()
        forwarded = cluster.observer.of(ProposalForwarded)
        assert [event.num_draft_tokens for event in forwarded] == [
            len(block.token_ids) for block in proposals(to_target)
        ]
        draft.is_hung = False  # to close its session
        await finish(cluster, [stream])


async def test_a_fault_while_one_request_follows_a_policy_costs_that_request_its_draft_only() -> None:
    async with toy_cluster(1, 1) as cluster:
        cluster.use(OFF)
        streams = [Stream(cluster, f"r{i}", seed=i) for i in range(3)]
        await cluster.until(lambda: all(len(stream.deltas) > 2 for stream in streams))
        (draft,) = drafts(cluster)
        (connection,) = draft.streams
        send = connection.send

        def fail_once(command: Any) -> None:
            if isinstance(command, Open):
                connection.send = send  # type: ignore[method-assign]
                raise RuntimeError("a fault of the router's own")
            send(command)

        connection.send = fail_once  # type: ignore[method-assign]
        to_target = sent_to(*targets(cluster))
        cluster.use(ON)
        await finish(cluster, streams)
        assert {command.request_id for command in proposals(to_target)} >= {"r1", "r2"}


async def test_a_bad_document_leaves_the_last_good_policy_in_force() -> None:
    async with toy_cluster(1, 1) as cluster:
        cluster.router.apply_policy("schema: paceline.policy/v1\nkill: {all: true}", 3)
        with pytest.raises(DocumentError, match=r"rules\[0\]\.action"):
            cluster.router.apply_policy("schema: paceline.policy/v1\nrules: [{id: a, action: perhaps}]", 4)
        assert cluster.router.status().policy_version == 3
        (*_, last) = await collect(cluster.router, request())
        assert last.policy == PolicyStamp(3, "off", "killed")


@pytest.mark.parametrize(
    ("match", "fields"),
    [
        ({"tenants": ["acme"]}, {"tenant": "acme"}),
        ({"workloads": ["code"]}, {"workload": "code"}),
        ({"key_labels": ["batch"]}, {"key_label": "batch"}),
        ({"temperature": {"min": 0.5, "max": 0.5}}, {"temperature": 0.5}),
        ({"prompt_tokens": {"min": 5, "max": 5}}, {"prompt": (3, 1, 4, 1, 5)}),
    ],
)
async def test_rules_see_the_request(match: dict[str, Any], fields: dict[str, Any]) -> None:
    async with toy_cluster(1, 1) as cluster:
        cluster.use(policy({"match": match, "action": "deny"}))
        for item, reason in ((request(**fields), "denied"), (request(), "default")):
            (*_, last) = await collect(cluster.router, item)
            assert last.stats is not None
            assert last.stats.policy == last.policy
            assert last.policy is not None
            assert last.policy.reason == reason


@pytest.mark.parametrize("key", ["user", "session"])
async def test_requests_of_one_user_or_session_are_in_one_cohort(key: str) -> None:
    halves = policy({"action": "allow", "percent": 50}, targeting_key=key)
    async with toy_cluster(1, 1) as cluster:
        cluster.use(halves)
        variants: dict[str, set[str]] = {}
        for i in range(24):
            (*_, last) = await collect(cluster.router, request(f"r{i}", max_tokens=1, **{key: f"k{i % 6}"}))
            assert last.policy is not None
            variants.setdefault(f"k{i % 6}", set()).add(last.policy.variant)
        assert all(len(found) == 1 for found in variants.values())
        assert set.union(*variants.values()) == {"canary", "control"}


async def test_a_killed_draft_version_is_left_for_another_and_never_opened_again() -> None:
    def prepare(cluster: ToyCluster) -> None:
        cluster.add_draft(version="good")
        cluster.add_draft(version="bad", agreement=0.0)

    async with toy_cluster(4, 0, prepare=prepare) as cluster:
        good, bad = drafts(cluster)
        streams = [Stream(cluster, f"r{i}", seed=i) for i in range(3)]
        await cluster.until(lambda: all(len(stream.deltas) > 2 for stream in streams))
        to_good, to_bad = sent_to(good), sent_to(bad)
        cluster.use(policy(version=2, kill={"draft_versions": ["bad"]}, default=default_settings(max_draft_tokens=4)))
        streams += [Stream(cluster, f"late{i}", seed=i) for i in range(3)]
        await finish(cluster, streams)
        assert not [command for command in to_bad if isinstance(command, Open)]
        assert {command.request_id for command in to_good if isinstance(command, Open)} >= {
            f"late{i}" for i in range(3)
        }
        assert {stream.policy.variant for stream in streams} == {"default"}


async def test_a_draft_version_without_a_replica_is_the_configured_one() -> None:
    rule = {"action": "allow", "match": {"draft_versions": ["toy-draft"]}, "effect": {"drafter": "model"}}
    async with toy_cluster(1, 0) as cluster:
        cluster.use(policy(rule))
        (*_, last) = await collect(cluster.router, request())
        assert last.policy == PolicyStamp(1, "canary", "no_drafter", "rule-0")
        assert [event.cause for event in cluster.observer.of(FellBack)] == [FallbackCause.UNAVAILABLE]


async def test_each_request_is_logged_once_with_its_decision_and_nothing_private(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, REQUEST_LOGGER)
    async with toy_cluster(1, 1) as cluster:
        cluster.use(policy({"action": "allow", "variant": "wide"}, version=4))
        await collect(cluster.router, request("first", user="alice", session="s-1", tenant="acme"))
    (line,) = [entry.message for entry in caplog.records if entry.name == REQUEST_LOGGER]
    fields = json.loads(line)
    expected = {
        "request_id": "first",
        "tenant": "acme",
        "outcome": "length",
        "policy_version": 4,
        "rule": "rule-0",
        "variant": "wide",
        "reason": "rule",
        "completion_tokens": 30,
    }
    assert fields | expected == fields
    assert "alice" not in line
    assert "s-1" not in line


async def test_a_configured_drafter_of_none_is_a_default_that_is_off() -> None:
    async with toy_cluster(1, 1, speculation=SpeculationConfig(drafter=Drafter.NONE)) as cluster:
        assert not cluster.router.policy.current.document.default.enabled
        (*_, last) = await collect(cluster.router, request())
        assert last.policy == PolicyStamp(0, "default", "disabled")
