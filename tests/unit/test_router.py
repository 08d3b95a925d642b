"""The router over toy pools: what a request gets, and what is left in the pools afterwards."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import pytest

from cluster.config import RouterConfig, SpeculationConfig
from cluster.core.speculation import FallbackCause
from cluster.messages.answer import ErrorKind, FinishReason, RequestError
from cluster.messages.request import Drafter, HoldMode, SpeculationOverride
from cluster.messages.rounds import Commit
from cluster.router.observer import (
    BlockVerified,
    FellBack,
    Outcome,
    RequestFinished,
    RequestResumed,
    RequestStarted,
    ResumeCause,
    RoundFinished,
    TokensDelivered,
)
from tests.fakes import byte_tokenizer
from tests.policies import default_only
from tests.toy_cluster import FOREVER_S, IMPATIENT, ToyCluster, collect, request, right_output, tokens_of, toy_cluster

pytestmark = pytest.mark.unit


def holding_target(cluster: ToyCluster) -> None:
    """A target that always waits for its block, so that the number of steps does not depend on the machine."""
    cluster.add_target(max_hold_s=FOREVER_S)


async def test_a_perfect_draft_gives_the_plain_output_in_fewer_steps() -> None:
    async with toy_cluster(0, 1, prepare=holding_target) as cluster:
        item = request(max_tokens=31)
        deltas = await collect(cluster.router, item)
        stats = deltas[-1].stats
        assert tokens_of(deltas) == right_output(item)
        assert "".join(delta.text for delta in deltas) == byte_tokenizer().decode(right_output(item))
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert stats is not None
        assert stats.num_steps == 7  # one token of the prompt's step, then six times 4 guesses and a bonus
        assert (stats.prompt_tokens, stats.completion_tokens, stats.fallbacks) == (3, 31, ())
        await cluster.until(cluster.is_free)


async def test_every_drafter_and_none_give_the_same_output() -> None:
    async with toy_cluster(1, 1) as cluster:
        for drafter in Drafter:
            item = request(f"r-{drafter}", speculation=SpeculationOverride(drafter=drafter))
            assert tokens_of(await collect(cluster.router, item)) == right_output(item)
        finished = {event.request_id: event.drafter for event in cluster.observer.of(RequestFinished)}
        assert finished["r-model"] is Drafter.MODEL
        assert finished["r-none"] is Drafter.NONE
        await cluster.until(cluster.is_free)


# --- who leaves what behind ------------------------------------------------------------------------------------------


async def test_a_client_that_closes_its_stream_frees_both_pools_at_once() -> None:
    async with toy_cluster(1, 1) as cluster:
        stream = cluster.router.generate(request(max_tokens=120))
        await anext(stream)
        await stream.aclose()
        assert cluster.router.status().models[0].num_requests == 0
        assert all(replica.num_requests == 0 for replica in cluster.router.status().replicas)
        await cluster.until(cluster.is_free)
        assert [event.outcome for event in cluster.observer.of(RequestFinished)] == [Outcome.CANCELLED]


async def test_a_client_that_leaves_before_the_first_token_frees_both_pools() -> None:
    async with toy_cluster(1, 1) as cluster:
        for host in cluster.hosts.values():
            host.is_hung = True
        waiting = asyncio.create_task(collect(cluster.router, request()))
        await cluster.until(lambda: cluster.router.status().models[0].num_requests == 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert cluster.router.status().models[0].num_requests == 0
        for host in cluster.hosts.values():
            host.is_hung = False
        await cluster.until(cluster.is_free)


async def test_a_stop_string_ends_the_request_everywhere_at_the_token_that_completed_it() -> None:
    async with toy_cluster(1, 1) as cluster:
        item = request(max_tokens=60)
        output = right_output(item)
        stop = byte_tokenizer().decode(output[10:12])
        deltas = await collect(cluster.router, request(max_tokens=60, stop=(stop,)))
        text = byte_tokenizer().decode(output)
        end = text.index(stop)
        assert "".join(delta.text for delta in deltas) == text[:end]
        assert tokens_of(deltas) == output[: end + len(stop)]
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, stop)
        assert deltas[-1].stats is not None
        assert deltas[-1].stats.completion_tokens == end + len(stop)
        await cluster.until(cluster.is_free)


async def test_a_stop_string_ends_the_request_even_if_nobody_reads() -> None:
    async with toy_cluster(1, 1) as cluster:
        item = request(max_tokens=120)
        stop = byte_tokenizer().decode(right_output(item)[20:22])
        stream = cluster.router.generate(request(max_tokens=120, stop=(stop,)))
        await anext(stream)
        await cluster.until(lambda: cluster.router.status().models[0].num_requests == 0)
        await cluster.until(cluster.is_free)
        await stream.aclose()


async def test_a_stop_token_is_named_as_the_reason() -> None:
    async with toy_cluster(1, 1) as cluster:
        token_id = right_output(request())[6]
        deltas = await collect(cluster.router, request(stop_token_ids=(token_id,)))
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert deltas[-1].stop_reason == token_id == tokens_of(deltas)[-1]


async def test_a_stopped_router_fails_what_runs_and_frees_the_pools() -> None:
    async with toy_cluster(1, 1) as cluster:
        running = asyncio.create_task(collect(cluster.router, request(max_tokens=120)))
        await cluster.until(lambda: bool(cluster.observer.of(TokensDelivered)))
        await cluster.router.stop()
        with pytest.raises(RequestError) as failure:
            await running
        assert failure.value.kind is ErrorKind.UNAVAILABLE
        await cluster.until(cluster.is_free)


# --- drafts that die, hang, or come back -----------------------------------------------------------------------------


async def test_a_draft_that_dies_is_replaced_by_another_without_a_trace_in_the_output() -> None:
    async with toy_cluster(0, 2, prepare=holding_target) as cluster:
        item = request(max_tokens=100)
        deltas = []
        async for delta in cluster.router.generate(item):
            deltas.append(delta)
            if len(deltas) == 3:
                used = next(h for h in cluster.hosts.values() if "draft" in h.info.replica_id and not h.pool.is_free())
                await cluster.kill(used)
        assert tokens_of(deltas) == right_output(item)
        stats = deltas[-1].stats
        assert stats is not None
        assert stats.fallbacks == (FallbackCause.LOST.value,)
        assert stats.acceptance_length > 3
        await cluster.until(cluster.is_free)


async def test_the_last_draft_that_dies_leaves_n_grams() -> None:
    async with toy_cluster(1, 1) as cluster:
        item = request(max_tokens=60)
        deltas = []
        async for delta in cluster.router.generate(item):
            deltas.append(delta)
            if len(deltas) == 2:
                await cluster.kill(cluster.hosts["draft-2"])
        assert tokens_of(deltas) == right_output(item)
        await cluster.until(cluster.is_free)


async def test_a_draft_that_comes_up_later_takes_over() -> None:
    speculation = SpeculationConfig(max_draft_tokens=4, drafter=Drafter.AUTO)
    async with toy_cluster(1, 0, speculation=speculation) as cluster:
        item = request(max_tokens=100)
        deltas = []
        async for delta in cluster.router.generate(item):
            deltas.append(delta)
            if len(deltas) == 2:
                cluster.add_draft()
                await cluster.router.refresh()
        assert tokens_of(deltas) == right_output(item)
        assert Drafter.MODEL in {event.drafter for event in cluster.observer.of(RoundFinished)}
        await cluster.until(cluster.is_free)


async def test_a_verified_block_reports_its_round_as_the_target_saw_it() -> None:
    async with toy_cluster(1, 1, speculation=SpeculationConfig(max_draft_tokens=4)) as cluster:
        stats = (await collect(cluster.router, request(max_tokens=60)))[-1].stats
        verified = cluster.observer.of(BlockVerified)
        assert sum(event.num_draft_tokens for event in verified) == stats.num_draft_tokens > 0
        assert sum(event.num_accepted_tokens for event in verified) == stats.num_accepted_tokens
        timed = [event for event in verified if event.round_trip_s]
        assert timed
        assert all(0 < event.draft_time_s < event.round_trip_s for event in timed)


async def test_a_hung_draft_is_given_up_and_asked_no_more() -> None:
    speculation = SpeculationConfig(max_draft_tokens=4, drafter=Drafter.MODEL)
    async with toy_cluster(1, 1, speculation=speculation, limits=IMPATIENT) as cluster:
        draft = cluster.hosts["draft-2"]
        draft.is_hung = True
        item = request(max_tokens=100)
        assert tokens_of(await collect(cluster.router, item)) == right_output(item)
        causes = [event.cause for event in cluster.observer.of(FellBack)]
        assert causes == [FallbackCause.SLOW, FallbackCause.UNAVAILABLE]
        draft.is_hung = False
        await cluster.until(cluster.is_free)


async def test_a_draft_that_refuses_is_not_asked_again() -> None:
    def prepare(cluster: ToyCluster) -> None:
        cluster.add_draft(max_sessions=0)

    async with toy_cluster(1, 0, prepare=prepare) as cluster:
        item = request(max_tokens=40)
        assert tokens_of(await collect(cluster.router, item)) == right_output(item)
        assert [event.cause for event in cluster.observer.of(FellBack)] == [FallbackCause.REFUSED]


async def test_withdrawing_speculation_takes_effect_on_running_requests() -> None:
    async with toy_cluster(1, 1) as cluster:
        item = request(max_tokens=100)
        deltas = []
        async for delta in cluster.router.generate(item):
            deltas.append(delta)
            if len(deltas) == 2:
                cluster.use(default_only(enabled=False))
                num_rounds = len(cluster.observer.of(RoundFinished))
        assert tokens_of(deltas) == right_output(item)
        assert len(cluster.observer.of(RoundFinished)) == num_rounds
        assert [event.cause for event in cluster.observer.of(FellBack)] == [FallbackCause.WITHDRAWN]
        assert len(deltas) > 80  # plain steps
        await cluster.until(cluster.is_free)


def commits_of(cluster: ToyCluster) -> list[Commit]:
    """What the only target commits from now on."""
    engine = cluster.hosts["target-1"].pool.engine
    commits: list[Commit] = []
    publish = engine.on_events

    def record(events: list[object]) -> None:
        commits.extend(event for event in events if isinstance(event, Commit))
        publish(events)

    engine.on_events = record
    return commits


async def test_a_policy_that_turns_on_and_off_again_is_followed_by_running_requests_and_off_costs_no_wait() -> None:
    off = SpeculationConfig(max_draft_tokens=4, enabled=False)
    async with toy_cluster(0, 1, prepare=holding_target, speculation=off) as cluster:
        commits = commits_of(cluster)
        item = request(max_tokens=100)
        deltas = []
        async for delta in cluster.router.generate(item):
            deltas.append(delta)
            if len(deltas) in (3, 12):
                turns_on = len(deltas) == 3
                cluster.use(default_only(enabled=turns_on, max_draft_tokens=4))
        assert tokens_of(deltas) == right_output(item)
        asked = [commit.next_draft_len for commit in commits]
        first, last = (pick(i for i, length in enumerate(asked) if length) for pick in (min, max))
        assert set(asked[:first]) == {0}
        assert set(asked[first : last + 1]) == {4}
        assert len(asked[last + 1 :]) > 20  # plain steps: nothing was asked for, so nothing was waited for
        assert [len(commit.token_ids) for commit in commits[first + 1 : last]] == [5] * (last - first - 1)
        assert last - first > 1
        await cluster.until(cluster.is_free)


async def test_a_request_that_wants_a_draft_model_speculates_as_soon_as_one_is_ready() -> None:
    speculation = SpeculationConfig(max_draft_tokens=4, drafter=Drafter.MODEL)
    async with toy_cluster(0, 0, prepare=holding_target, speculation=speculation) as cluster:
        commits = commits_of(cluster)
        item = request(max_tokens=100)
        deltas = []
        async for delta in cluster.router.generate(item):
            deltas.append(delta)
            if len(deltas) == 5:
                assert not any(commit.next_draft_len for commit in commits)
                cluster.add_draft()
                await cluster.router.refresh()
        assert tokens_of(deltas) == right_output(item)
        assert sum(commit.num_accepted_tokens for commit in commits) > 50
        await cluster.until(cluster.is_free)


async def test_a_wider_window_takes_effect_on_running_requests() -> None:
    async with toy_cluster(0, 1, prepare=holding_target) as cluster:
        commits = commits_of(cluster)
        item = request(max_tokens=100)
        deltas = []
        async for delta in cluster.router.generate(item):
            deltas.append(delta)
            if len(deltas) == 3:
                cluster.use(default_only(max_draft_tokens=9))
        assert tokens_of(deltas) == right_output(item)
        assert {4, 9} <= {commit.num_draft_tokens for commit in commits}


async def test_a_request_may_ask_for_a_wider_window_than_the_default() -> None:
    async with toy_cluster(0, 1, prepare=holding_target) as cluster:
        item = request(max_tokens=121, speculation=SpeculationOverride(max_draft_tokens=23))
        deltas = await collect(cluster.router, item)
        assert tokens_of(deltas) == right_output(item)
        assert deltas[-1].stats is not None
        assert deltas[-1].stats.num_steps == 6  # the prompt's, then five times 23 guesses and a bonus


# --- targets that die, refuse or hang --------------------------------------------------------------------------------


async def test_a_target_that_dies_is_replaced_by_another_without_a_trace_in_the_output() -> None:
    async with toy_cluster(2, 1) as cluster:
        item = request(max_tokens=100, temperature=1.0)
        deltas = []
        async for delta in cluster.router.generate(item):
            deltas.append(delta)
            if len(deltas) == 5:
                used = next(h for h in cluster.hosts.values() if "target" in h.info.replica_id and not h.pool.is_free())
                await cluster.kill(used)
        assert tokens_of(deltas) == right_output(item)
        assert deltas[-1].stats is not None
        assert deltas[-1].stats.num_resumes == 1
        assert [event.cause for event in cluster.observer.of(RequestResumed)] == [ResumeCause.LOST]
        await cluster.until(cluster.is_free)


async def test_a_request_waits_for_a_new_target_when_the_only_one_dies() -> None:
    async with toy_cluster(1, 1) as cluster:
        item = request(max_tokens=60)
        deltas = []
        async for delta in cluster.router.generate(item):
            deltas.append(delta)
            if len(deltas) == 3:
                await cluster.kill(cluster.hosts["target-1"])
                await cluster.router.refresh()
                cluster.add_target()
        assert tokens_of(deltas) == right_output(item)
        await cluster.until(cluster.is_free)


async def test_a_broken_stream_is_reconnected() -> None:
    async with toy_cluster(1, 1) as cluster:
        item = request(max_tokens=60)
        deltas = []
        async for delta in cluster.router.generate(item):
            deltas.append(delta)
            if len(deltas) == 3:
                await cluster.hosts["target-1"].cut()
                await cluster.hosts["draft-2"].cut()
        assert tokens_of(deltas) == right_output(item)
        assert len(cluster.hosts["target-1"].streams) == 2
        await cluster.until(cluster.is_free)


async def test_a_hung_target_is_left_for_another() -> None:
    async with toy_cluster(2, limits=IMPATIENT) as cluster:
        item = request(max_tokens=60)
        deltas = []
        async for delta in cluster.router.generate(item):
            deltas.append(delta)
            if len(deltas) == 3:
                used = next(h for h in cluster.hosts.values() if not h.pool.is_free())
                used.is_hung = True
        assert tokens_of(deltas) == right_output(item)
        assert [event.cause for event in cluster.observer.of(RequestResumed)] == [ResumeCause.SILENT]
        used.is_hung = False
        await cluster.until(cluster.is_free)


async def test_a_draining_target_hands_its_requests_over() -> None:
    async with toy_cluster(2, 1) as cluster:
        item = request(max_tokens=60)
        deltas = []
        async for delta in cluster.router.generate(item):
            deltas.append(delta)
            if len(deltas) == 3:
                used = next(h for h in cluster.hosts.values() if "target" in h.info.replica_id and not h.pool.is_free())
                used.pool.engine.stop()
                used.is_hung = True
        assert tokens_of(deltas) == right_output(item)
        assert [event.cause for event in cluster.observer.of(RequestResumed)] == [ResumeCause.REFUSED]
        await cluster.until(cluster.is_free)


async def test_a_request_that_meets_a_draining_target_waits_for_the_next() -> None:
    async with toy_cluster(1) as cluster:
        old = cluster.hosts["target-1"]
        old.pool.engine.stop()
        deltas = asyncio.create_task(collect(cluster.router, request()))
        await cluster.until(lambda: bool(cluster.observer.of(RequestResumed)))
        cluster.add_target()
        assert tokens_of(await deltas) == right_output(request())


async def test_without_a_target_requests_are_soon_unavailable() -> None:
    async with toy_cluster(0, 1, limits=IMPATIENT) as cluster:
        assert not cluster.router.ready()
        assert await error_of(cluster, request()) is ErrorKind.UNAVAILABLE


async def test_a_request_that_comes_while_no_target_is_connected_waits_a_little() -> None:
    async with toy_cluster(0, 1) as cluster:
        waiting = asyncio.create_task(collect(cluster.router, request()))
        await cluster.until(lambda: bool(cluster.observer.of(RequestStarted)))
        cluster.add_target()
        assert tokens_of(await waiting) == right_output(request())


async def test_a_full_target_makes_a_request_overloaded() -> None:
    def prepare(cluster: ToyCluster) -> None:
        cluster.add_target(max_num_seqs=1, max_queued=0)

    async with toy_cluster(0, 0, prepare=prepare) as cluster:
        first = cluster.router.generate(request("first", max_tokens=120))
        await anext(first)
        assert await error_of(cluster, request("second")) is ErrorKind.OVERLOADED
        await first.aclose()


async def test_what_a_target_can_never_run_is_the_client_s_fault() -> None:
    async with toy_cluster(2) as cluster:
        assert await error_of(cluster, request(prompt=(1,) * 200)) is ErrorKind.CONTEXT_LENGTH
        assert await error_of(cluster, request("r2", prompt=(999,))) is ErrorKind.INVALID
        await cluster.until(cluster.is_free)


async def test_the_longest_sequence_is_what_every_target_replica_takes() -> None:
    """As the replicas publish it: their models and KV pools may hold less than what is configured."""
    async with toy_cluster() as cluster:
        lengths = [cluster.router.max_model_len("toy")]
        for options in ({"max_model_len": 96}, {"max_model_len": 64}):
            cluster.add_target(**options)
            await cluster.router.refresh()
            lengths.append(cluster.router.max_model_len("toy"))
        for replica_id in ("target-2", "target-1"):
            await cluster.kill(cluster.hosts[replica_id])
            await cluster.router.refresh()
            lengths.append(cluster.router.max_model_len("toy"))
        assert lengths == [128, 96, 64, 96, 96]  # the last known one stays while nobody is there


async def test_what_went_wrong_inside_a_replica_is_logged_once_and_not_told_to_clients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with toy_cluster(1) as cluster:

        def fail(_: object) -> None:
            raise RuntimeError("/srv/secret: device fell over")

        cluster.hosts["target-1"].pool.runner.before_step = fail
        with pytest.raises(RequestError) as failure:
            await collect(cluster.router, request())
    assert failure.value.kind is ErrorKind.INTERNAL
    assert failure.value.message == "the target replica failed on this request"
    told = [record for record in caplog.records if record.name == "cluster.router.target_link"]
    assert len(told) == 1
    assert "/srv/secret: device fell over" in told[0].getMessage()


async def test_an_unknown_model_is_not_found() -> None:
    async with toy_cluster(1) as cluster:
        with pytest.raises(RequestError) as failure:
            cluster.router.max_model_len("other")
        assert failure.value.kind is ErrorKind.NOT_FOUND


async def error_of(cluster: ToyCluster, item: object) -> ErrorKind:
    with pytest.raises(RequestError) as failure:
        await collect(cluster.router, item)  # type: ignore[arg-type]
    return failure.value.kind


# --- deadlines and bounds --------------------------------------------------------------------------------------------


async def test_a_deadline_before_the_first_token_is_an_error() -> None:
    async with toy_cluster(1) as cluster:
        cluster.hosts["target-1"].is_hung = True
        assert await error_of(cluster, request(deadline_s=0.02)) is ErrorKind.DEADLINE
        assert [event.outcome for event in cluster.observer.of(RequestFinished)] == [Outcome.DEADLINE]


async def test_a_deadline_in_the_middle_ends_the_output_there() -> None:
    async with toy_cluster(1) as cluster:
        item = request(max_tokens=100, deadline_s=0.2)
        deltas = []
        async for delta in cluster.router.generate(item):
            deltas.append(delta)
            cluster.hosts["target-1"].is_hung = len(deltas) >= 3
        output = tokens_of(deltas)
        assert deltas[-1].finish_reason is FinishReason.DEADLINE
        assert 0 < len(output) < 100
        assert output == right_output(item)[: len(output)]
        cluster.hosts["target-1"].is_hung = False
        await cluster.until(cluster.is_free)


async def test_a_flood_of_one_tenant_is_bounded_and_does_not_delay_another() -> None:
    config = RouterConfig(max_queued_per_tenant=10)
    async with toy_cluster(1, router=config) as cluster:
        slots = 8 + 1
        flood = [
            asyncio.create_task(collect(cluster.router, request(f"f{n}", max_tokens=100, tenant="flood")))
            for n in range(slots + 10)
        ]
        await cluster.until(lambda: cluster.router.status().models[0].num_queued == 10)
        with pytest.raises(RequestError) as failure:
            await collect(cluster.router, request("one-too-many", tenant="flood"))
        assert failure.value.kind is ErrorKind.OVERLOADED
        assert failure.value.retry_after_s is not None
        await collect(cluster.router, request("other", max_tokens=4, tenant="other"))
        assert sum(task.done() for task in flood) <= slots  # it overtook everything that was queued
        await asyncio.gather(*flood)
        await cluster.until(cluster.is_free)


async def test_an_id_that_is_in_flight_is_refused() -> None:
    async with toy_cluster(1) as cluster:
        first = cluster.router.generate(request("same", max_tokens=100))
        await anext(first)
        assert await error_of(cluster, request("same")) is ErrorKind.INVALID
        await first.aclose()
        await cluster.until(cluster.is_free)
        assert tokens_of(await collect(cluster.router, request("same"))) == right_output(request("same"))


# --- what is reported ------------------------------------------------------------------------------------------------


async def test_every_request_is_reported_once_with_its_times() -> None:
    async with toy_cluster(1, 1) as cluster:
        await collect(cluster.router, request("a", max_tokens=20, tenant="t", workload="w"))
        (started,) = cluster.observer.of(RequestStarted)
        (finished,) = cluster.observer.of(RequestFinished)
        deltas = cluster.observer.of(TokensDelivered)
        assert started.labels == finished.labels
        assert (finished.labels.model, finished.labels.tenant, finished.labels.workload) == ("toy", "t", "w")
        assert finished.outcome is Outcome.LENGTH
        assert finished.stats.completion_tokens == 20 == sum(delta.num_tokens for delta in deltas)
        assert [delta.first for delta in deltas] == [True] + [False] * (len(deltas) - 1)
        assert finished.ttft_s == deltas[0].interval_s
        assert finished.tpot_s == pytest.approx(sum(delta.interval_s for delta in deltas[1:]) / 19)
        assert finished.e2e_s >= finished.ttft_s + sum(delta.interval_s for delta in deltas[1:]) - 1e-9
        rounds = cluster.observer.of(RoundFinished)
        assert all(0 <= done.draft_time_s <= done.round_trip_s for done in rounds)


async def test_status_describes_pools_and_acceptance() -> None:
    async with toy_cluster(2, 1) as cluster:
        await cluster.until(cluster.router.ready)
        await collect(cluster.router, request("a", max_tokens=31))
        await cluster.until(cluster.is_free)
        report = asdict(cluster.router.status())
        assert report["is_ready"]
        assert {replica["pool"] for replica in report["replicas"]} == {"target", "draft"}
        assert all(replica["load"]["num_total_blocks"] == 256 for replica in report["replicas"])
        (model,) = report["models"]
        assert (model["model"], model["num_tokens"], model["num_requests"]) == ("toy", 31, 0)
        assert model["acceptance_length"] == pytest.approx(31 / model["num_steps"])


async def test_status_tells_the_versions_of_replicas_apart() -> None:
    async with toy_cluster(1, prepare=lambda cluster: [cluster.add_draft(version=v) for v in ("v1", "v2")]) as cluster:
        await cluster.until(lambda: len(cluster.router.status().replicas) == 3)
        versions = {replica.replica_id: replica.version for replica in cluster.router.status().replicas}
        assert versions == {"draft-1": "v1", "draft-2": "v2", "target-3": None}


async def test_a_failing_discovery_changes_nothing() -> None:
    async with toy_cluster(1) as cluster:

        async def fail() -> None:
            raise OSError("the controller is away")

        cluster.router._discover = fail  # type: ignore[assignment]
        await cluster.router.refresh()
        assert tokens_of(await collect(cluster.router, request())) == right_output(request())


@pytest.mark.parametrize("hold", list(HoldMode))
async def test_many_requests_at_once_keep_their_outputs(hold: HoldMode) -> None:
    def prepare(cluster: ToyCluster) -> None:
        cluster.add_target(hold=hold)
        cluster.add_draft(agreement=0.7)

    async with toy_cluster(0, 0, prepare=prepare) as cluster:
        items = [request(f"r{n}", prompt=(n + 1, n + 2), max_tokens=40, seed=n, temperature=1.0) for n in range(12)]
        outputs = await asyncio.gather(*(collect(cluster.router, item) for item in items))
        assert [tokens_of(deltas) for deltas in outputs] == [right_output(item) for item in items]
        await cluster.until(cluster.is_free)
