"""Pool streams over real gRPC: who gets which event, and what every kind of ending leaves behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc.aio
import pytest

from cluster.messages.answer import FinishReason
from cluster.messages.request import SamplingParams
from cluster.messages.rounds import (
    Abort,
    Close,
    Commit,
    Committed,
    DraftBlock,
    Open,
    PoolLoad,
    Refusal,
    RefusalReason,
    Submit,
)
from cluster.transport import limits
from cluster.transport.codec import CodecError
from cluster.transport.draft_stream import DRAFT_PROTOCOL, GrpcDraftStream
from cluster.transport.protocol import StreamSettings
from cluster.transport.stream import CloseCause, StreamClosed
from cluster.transport.target_stream import TARGET_PROTOCOL, GrpcTargetStream
from protos.paceline.v1 import target_pb2
from tests.streams import PATIENCE_S, Network, Sink, end_aborted, raw_call, raw_replica, serving, submit

pytestmark = pytest.mark.integration

LOAD = PoolLoad(1, 0, 9, 10, 1)
SMALL = StreamSettings(outbox_bytes=64 << 10, frame_bytes=8 << 10)
ALERT = StreamSettings(keepalive_s=0.3, keepalive_timeout_s=0.3)


def echo(command: Any) -> list[Any]:
    """A target that commits whatever it is told to verify."""
    if isinstance(command, DraftBlock):
        return [Commit(command.request_id, command.committed_len, command.token_ids)]
    return end_aborted(command)


async def closed(stream: GrpcTargetStream | GrpcDraftStream) -> StreamClosed:
    async with asyncio.timeout(PATIENCE_S):
        await stream.closed.wait()
    assert stream.end is not None
    return stream.end


async def read_to_the_end(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
    while isinstance(await call.read(), bytes):
        pass


async def flood(stream: GrpcTargetStream) -> None:
    for index in range(10_000):
        stream.send(submit(f"request-{index}", prompt=tuple(range(1000))))
        await asyncio.sleep(0)


def faulty_frame(**submit_fields: Any) -> bytes:
    return target_pb2.TargetCommands(commands=[{"submit": submit_fields}]).SerializeToString()


# --- who gets what ---------------------------------------------------------------------------------------------------


async def test_two_routers_of_one_replica_each_get_the_events_of_their_own_requests() -> None:
    async with serving(TARGET_PROTOCOL, echo) as (server, engine):
        streams = [GrpcTargetStream(server.address) for _ in range(2)]
        sinks = [Sink(), Sink()]
        for index, (stream, sink) in enumerate(zip(streams, sinks, strict=True)):
            for request_id in (f"router-{index}-a", f"router-{index}-b"):
                stream.subscribe(request_id, sink)
                stream.send(submit(request_id))
                stream.send(DraftBlock(request_id, 3, (index,)))
        for index, sink in enumerate(sinks):
            events = await sink.until(2)
            assert [event.request_id for event in events] == [f"router-{index}-a", f"router-{index}-b"]
            assert [event.token_ids for event in events] == [(index,), (index,)]
        assert all(stream.counters.num_unclaimed_events == 0 for stream in streams)
        for stream in streams:
            await stream.close()
    assert engine.hub.counters.num_connections == 0


async def test_what_is_sent_in_one_turn_reaches_the_engine_as_one_batch_in_order() -> None:
    async with serving(TARGET_PROTOCOL) as (server, engine):
        stream = GrpcTargetStream(server.address)
        await stream.connected(PATIENCE_S)
        sent = [submit("a"), DraftBlock("a", 3, (4,)), submit("b"), Abort("a")]
        for command in sent:
            stream.send(command)
        await engine.until_has(*sent)
        assert engine.batches == [tuple(sent)]
        await stream.close()


async def test_what_is_sent_before_the_connection_stands_is_not_lost() -> None:
    async with serving(TARGET_PROTOCOL) as (server, engine):
        stream = GrpcTargetStream(server.address)
        stream.send(submit("a"))
        await engine.until_has(submit("a"))
        await stream.close()


async def test_an_engine_publishes_from_its_own_thread() -> None:
    async with serving(TARGET_PROTOCOL) as (server, engine):
        stream, sink = GrpcTargetStream(server.address), Sink()
        stream.subscribe("a", sink)
        stream.send(submit("a"))
        await engine.until_has(submit("a"))
        commits = [Commit("a", 3 + index, (index,)) for index in range(100)]
        thread = threading.Thread(target=lambda: [engine.hub.publish([commit]) for commit in commits])
        thread.start()
        assert await sink.until(100) == commits
        thread.join()
        await stream.close()


async def test_every_router_learns_the_load_and_a_new_one_at_once() -> None:
    async with serving(TARGET_PROTOCOL) as (server, engine):
        early, late = GrpcTargetStream(server.address), None
        await early.connected(PATIENCE_S)
        assert early.load is None
        sink = Sink()
        early.subscribe("a", sink)
        early.send(submit("a"))
        await engine.until_has(submit("a"))
        engine.hub.publish([LOAD, Commit("a", 3, (4,))])
        await sink.until(1)
        late = GrpcTargetStream(server.address)
        late.subscribe("b", sink)
        late.send(submit("b"))
        await engine.until_has(submit("b"))
        engine.hub.publish([Commit("b", 3, (4,))])
        await sink.until(2)
        assert early.load == late.load == LOAD
        assert [type(event) for event in sink.events] == [Commit, Commit]
        for stream in (early, late):
            await stream.close()


async def test_events_of_an_unsubscribed_request_are_dropped_and_counted() -> None:
    async with serving(TARGET_PROTOCOL, echo) as (server, _):
        stream, sink = GrpcTargetStream(server.address), Sink()
        stream.subscribe("a", sink)
        stream.subscribe("b", sink)
        stream.unsubscribe("a")
        for request_id in ("a", "b"):
            stream.send(submit(request_id))
            stream.send(DraftBlock(request_id, 3, (1,)))
        (event,) = await sink.until(1)
        assert event.request_id == "b"
        assert stream.counters.num_unclaimed_events == 1
        await stream.close()


async def test_a_draft_pool_speaks_its_own_protocol_over_the_same_machinery() -> None:
    def draft(command: Any) -> list[Any]:
        if isinstance(command, Committed):
            return [DraftBlock(command.request_id, command.base_len + 1, (7, 8), command.epoch, 0.001)]
        return []

    async with serving(DRAFT_PROTOCOL, draft) as (server, engine):
        stream, sink = GrpcDraftStream(server.address), Sink()
        stream.subscribe("a", sink)
        opened = Open("a", 1, (1, 2, 3), SamplingParams(max_tokens=8, seed=1), 2)
        stream.send(opened)
        stream.send(Committed("a", 1, 3, (4,), 2))
        assert await sink.until(1) == [DraftBlock("a", 4, (7, 8), 1, 0.001)]
        await stream.close()
        await engine.until_has(Close("a"))


# --- how streams end -------------------------------------------------------------------------------------------------


async def test_the_end_of_a_stream_aborts_all_of_its_requests_and_no_other() -> None:
    async with serving(TARGET_PROTOCOL) as (server, engine):
        leaving, staying = GrpcTargetStream(server.address), GrpcTargetStream(server.address)
        for request_id in ("a", "b"):
            leaving.send(submit(request_id))
        staying.send(submit("c"))
        await engine.until_has(submit("a"), submit("b"), submit("c"))
        await leaving.close()
        await engine.until_has(Abort("a"), Abort("b"))
        assert Abort("c") not in engine.commands
        assert not staying.closed.is_set()
        assert leaving.end is not None
        assert leaving.end.cause is CloseCause.LOCAL
        await staying.close()


async def test_a_broken_connection_aborts_its_requests_and_closes_the_stream() -> None:
    async with serving(TARGET_PROTOCOL) as (server, engine):
        network = Network(server.address)
        async with network.open() as address:
            stream = GrpcTargetStream(address)
            stream.send(submit("a"))
            await engine.until_has(submit("a"))
            network.cut()
            assert (await closed(stream)).cause is CloseCause.LOST
            await engine.until_has(Abort("a"))
            await stream.close()


async def test_both_ends_notice_a_peer_that_has_gone_silent() -> None:
    async with serving(TARGET_PROTOCOL, settings=ALERT) as (server, engine):
        network = Network(server.address)
        async with network.open() as address:
            stream = GrpcTargetStream(address, ALERT)
            stream.send(submit("a"))
            await engine.until_has(submit("a"))
            network.go_silent()
            assert (await closed(stream)).cause is CloseCause.LOST
            await engine.until_has(Abort("a"))
            await stream.close()


def test_the_default_keepalive_notices_a_dead_peer_within_five_seconds() -> None:
    settings = StreamSettings()
    assert settings.keepalive_s + settings.keepalive_timeout_s <= 5


async def test_a_stopping_server_writes_what_is_delivered_then_closes_every_stream() -> None:
    async with serving(TARGET_PROTOCOL) as (server, engine):
        stream, sink = GrpcTargetStream(server.address), Sink()
        ends: list[StreamClosed] = []
        stream.on_closed(ends.append)
        stream.subscribe("a", sink)
        stream.send(submit("a"))
        await engine.until_has(submit("a"))
        commits = [Commit("a", 3 + index, (index,)) for index in range(50)]
        engine.hub.publish(commits)
        await asyncio.sleep(0)  # the hand-over's turn
        await server.stop()
        assert engine.commands == [submit("a"), Abort("a")]
        end = await closed(stream)
        assert end.cause is CloseCause.PEER
        assert sink.events == commits
        called_late = asyncio.get_running_loop().create_future()
        stream.on_closed(called_late.set_result)
        assert await called_late is end
        assert ends == [end]
        with pytest.raises(StreamClosed, match="peer"):
            stream.send(submit("b"))
        await stream.close()


async def test_a_caller_reconnects_by_making_a_new_stream_under_the_same_request_id() -> None:
    async with serving(TARGET_PROTOCOL, echo) as (server, engine):
        first = GrpcTargetStream(server.address)
        first.send(submit("a"))
        await engine.until_has(submit("a"))
        await first.close()
        second, sink = GrpcTargetStream(server.address), Sink()
        second.subscribe("a", sink)
        second.send(submit("a"))
        second.send(DraftBlock("a", 3, (9,)))
        assert await sink.until(1) == [Commit("a", 3, (9,))]
        await second.close()


async def test_a_new_stream_reaches_a_replica_that_was_restarted_on_its_port() -> None:
    async with serving(TARGET_PROTOCOL) as (server, _):
        port = int(server.address.split(":")[1])
        stream = GrpcTargetStream(server.address)
        await stream.connected(PATIENCE_S)
    await closed(stream)
    await stream.close()
    async with serving(TARGET_PROTOCOL, port=port) as (server, engine):
        stream = GrpcTargetStream(server.address)
        stream.send(submit("a"))
        await engine.until_has(submit("a"))
        await stream.close()


async def test_a_replica_that_is_not_there_is_reported_as_lost() -> None:
    async with serving(TARGET_PROTOCOL) as (server, _):
        address = server.address
    stream = GrpcTargetStream(address)
    with pytest.raises(StreamClosed, match="lost"):
        await stream.connected(PATIENCE_S)
    assert stream.closed.is_set()
    await stream.close()


async def test_a_replica_that_never_answers_is_given_up_after_the_timeout() -> None:
    async with serving(TARGET_PROTOCOL) as (server, _):
        network = Network(server.address)
        network.go_silent()
        async with network.open() as address:
            stream = GrpcTargetStream(address)
            with pytest.raises(StreamClosed, match="did not answer"):
                await stream.connected(0.2)
            await stream.close()


# --- bounds ----------------------------------------------------------------------------------------------------------


async def test_a_router_that_does_not_read_is_cut_with_bounded_memory_and_costs_nobody_else() -> None:
    async with (
        serving(TARGET_PROTOCOL, echo, SMALL) as (server, engine),
        raw_call(server.address, TARGET_PROTOCOL.service) as slow,
    ):
        quick, sink = GrpcTargetStream(server.address), Sink()
        quick.subscribe("quick", sink)
        quick.send(submit("quick"))
        await slow.write(TARGET_PROTOCOL.encode_command(submit("slow")))
        await engine.until_has(submit("quick"), submit("slow"))
        most_waiting = num_published = 0
        async with asyncio.timeout(PATIENCE_S):
            while Abort("slow") not in engine.commands:
                engine.hub.publish([Commit("slow", 3, tuple(range(33)))] * 20)
                num_published += 20
                await asyncio.sleep(0)
                most_waiting = max(most_waiting, server.waiting_bytes)
        assert SMALL.outbox_bytes // 2 < most_waiting <= SMALL.outbox_bytes + (1 << 10)
        quick.send(DraftBlock("quick", 3, (4,)))
        assert await sink.until(1) == [Commit("quick", 3, (4,))]
        await quick.close()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(grpc.aio.AioRpcError, match="slow reader"):
                await read_to_the_end(slow)


async def test_a_replica_that_does_not_read_overfills_the_outbox_and_ends_the_stream() -> None:
    stuck = asyncio.Event()

    async def ignore(context: Any) -> None:
        await context.send_initial_metadata(())
        await stuck.wait()

    async with raw_replica(TARGET_PROTOCOL.service, ignore) as address:
        stream = GrpcTargetStream(address, SMALL)
        ends: list[StreamClosed] = []
        stream.on_closed(ends.append)
        with pytest.raises(StreamClosed, match="overflow"):
            await flood(stream)
        assert (await closed(stream)).cause is CloseCause.OVERFLOW
        await stream.close()
        assert [end.cause for end in ends] == [CloseCause.OVERFLOW]
        stuck.set()


async def test_a_prompt_of_the_largest_size_travels_alone_in_its_frame() -> None:
    async with serving(TARGET_PROTOCOL) as (server, engine):
        stream = GrpcTargetStream(server.address)
        largest = submit("a", prompt=(limits.MAX_COUNT,) * limits.MAX_SEQUENCE_TOKENS)
        for command in (submit("before"), largest, submit("after")):
            stream.send(command)
        await engine.until_has(submit("before"), largest, submit("after"))
        await stream.close()


# --- malformed messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame", [b"\xff\xff\xff", faulty_frame(request_id=""), bytes(limits.MAX_FRAME_BYTES + 1)], ids=len
)
async def test_a_frame_that_is_no_frame_ends_its_stream_and_no_other(frame: bytes) -> None:
    async with (
        serving(TARGET_PROTOCOL) as (server, engine),
        raw_call(server.address, TARGET_PROTOCOL.service) as rogue,
    ):
        sound = GrpcTargetStream(server.address)
        sound.send(submit("sound"))
        await rogue.write(TARGET_PROTOCOL.encode_command(submit("rogue")))
        await engine.until_has(submit("sound"), submit("rogue"))
        await rogue.write(frame)
        await engine.until_has(Abort("rogue"))
        assert (await rogue.code()).name in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")
        assert Abort("sound") not in engine.commands
        assert not sound.closed.is_set()
        await sound.close()


async def test_a_malformed_submit_is_refused_and_a_malformed_proposal_only_dropped() -> None:
    proposal = {"request_id": "a", "token_ids": range(33)}
    dropped = target_pb2.TargetCommands(commands=[{"propose": proposal}]).SerializeToString()
    async with (
        serving(TARGET_PROTOCOL, echo) as (server, engine),
        raw_call(server.address, TARGET_PROTOCOL.service) as call,
    ):
        sound = TARGET_PROTOCOL.encode_command(submit("a")) + TARGET_PROTOCOL.encode_command(DraftBlock("a", 3, (4,)))
        await call.write(dropped + faulty_frame(request_id="b") + sound)
        events: list[Any] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(events) < 2 and isinstance(frame := await call.read(), bytes):
                events += TARGET_PROTOCOL.decode_events(frame).messages
        refusal, commit = sorted(events, key=lambda event: isinstance(event, Commit))
        assert commit == Commit("a", 3, (4,))
        assert (refusal.request_id, refusal.reason) == ("b", RefusalReason.UNSUPPORTED)
        assert "prompt_token_ids" in refusal.message
        assert engine.hub.counters.num_malformed_messages == 2
        assert engine.commands == [submit("a"), DraftBlock("a", 3, (4,))]


async def test_a_malformed_event_ends_its_request_at_both_ends_and_no_other() -> None:
    received: list[Any] = []
    cancelled = asyncio.Event()

    async def garble(context: Any) -> None:
        bad = target_pb2.TargetEvents(events=[{"commit": {"request_id": "bad", "token_ids": range(34)}}])
        await context.write(bad.SerializeToString() + TARGET_PROTOCOL.encode_event(Commit("good", 3, (4,))))
        while isinstance(frame := await context.read(), bytes):
            received.extend(TARGET_PROTOCOL.decode_commands(frame).messages)
            if Abort("bad") in received:
                cancelled.set()

    async with raw_replica(TARGET_PROTOCOL.service, garble) as address:
        stream, good, bad = GrpcTargetStream(address), Sink(), Sink()
        stream.subscribe("good", good)
        stream.subscribe("bad", bad)
        assert await good.until(1) == [Commit("good", 3, (4,))]
        (refusal,) = await bad.until(1)
        assert (refusal.request_id, refusal.reason) == ("bad", RefusalReason.INTERNAL)
        async with asyncio.timeout(PATIENCE_S):
            await cancelled.wait()
        assert received == [Abort("bad")]
        assert stream.counters.num_malformed_messages == 1
        await stream.close()


async def test_a_replica_that_sends_rubbish_is_given_up() -> None:
    async def rubbish(context: Any) -> None:
        await context.write(b"\xff\xff\xff")
        await context.read()

    async with raw_replica(TARGET_PROTOCOL.service, rubbish) as address:
        stream = GrpcTargetStream(address)
        assert (await closed(stream)).cause is CloseCause.MALFORMED
        await stream.close()


async def test_an_event_that_the_wire_cannot_carry_ends_its_request_and_no_other() -> None:
    async with serving(TARGET_PROTOCOL) as (server, engine):
        stream, good, bad = GrpcTargetStream(server.address), Sink(), Sink()
        stream.subscribe("good", good)
        stream.subscribe("bad", bad)
        stream.send(submit("good"))
        stream.send(submit("bad"))
        await engine.until_has(submit("good"), submit("bad"))
        engine.hub.publish([Commit("bad", 3, (-1,)), Commit("good", 3, (4,))])
        assert await good.until(1) == [Commit("good", 3, (4,))]
        refusal = (await bad.until(1))[0]
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, "token_ids" in refusal.message) == (RefusalReason.INTERNAL, True)
        await engine.until_has(Abort("bad"))
        await stream.close()


async def test_a_sink_that_raises_loses_its_request_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: Any) -> None:
        raise ZeroDivisionError(event.request_id)

    async with serving(TARGET_PROTOCOL, echo) as (server, engine):
        stream, good = GrpcTargetStream(server.address), Sink()
        stream.subscribe("bad", broken)
        stream.subscribe("good", good)
        for request_id in ("bad", "good"):
            stream.send(submit(request_id))
            stream.send(DraftBlock(request_id, 3, (1,)))
        await good.until(1)
        await engine.until_has(Abort("bad"))
        assert "sink of request bad failed" in caplog.text
        assert not stream.closed.is_set()
        await stream.close()


async def test_a_command_that_the_wire_cannot_carry_fails_at_its_sender_and_leaves_the_stream_open() -> None:
    async with serving(TARGET_PROTOCOL) as (server, engine):
        stream = GrpcTargetStream(server.address)
        with pytest.raises(CodecError, match="prompt_token_ids"):
            stream.send(Submit("a", (), SamplingParams(max_tokens=1, seed=0)))
        stream.send(submit("b"))
        await engine.until_has(submit("b"))
        assert engine.commands == [submit("b")]
        await stream.close()


async def test_a_finished_request_leaves_nothing_behind_and_its_late_commands_go_nowhere() -> None:
    async with serving(TARGET_PROTOCOL) as (server, engine):
        stream, sink = GrpcTargetStream(server.address), Sink()
        stream.subscribe("a", sink)
        stream.send(submit("a"))
        await engine.until_has(submit("a"))
        engine.hub.publish([Commit("a", 3, (4,), finish_reason=FinishReason.STOP)])
        await sink.until(1)
        stream.send(DraftBlock("a", 3, (5,)))
        stream.send(Abort("a"))
        stream.send(submit("b"))
        await engine.until_has(submit("b"))
        assert engine.commands == [submit("a"), submit("b")]
        assert engine.hub.counters.num_unclaimed_commands == 2
        await stream.close()
