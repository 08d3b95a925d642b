"""The in-process stream: the same promises as over gRPC, and faults that a seed reproduces."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages.rounds import Abort, Commit, DraftBlock, Refusal, RefusalReason
from cluster.transport.hub import PoolHub
from cluster.transport.loopback import NO_FAULTS, Faults, FaultSchedule, LoopbackStream
from cluster.transport.stream import CloseCause, StreamClosed
from cluster.transport.target_stream import TARGET_PROTOCOL
from tests.streams import FakeEngine, Sink, end_aborted, submit

pytestmark = pytest.mark.unit

SHAKY = Faults(seed=3, drop=0.2, duplicate=0.2, reorder=0.3, delay=0.2, only=(DraftBlock,))
NUM_BLOCKS = 200


def echo(command: Any) -> list[Any]:
    if isinstance(command, DraftBlock):
        return [Commit(command.request_id, command.committed_len, command.token_ids)]
    return end_aborted(command)


def connect(faults: Faults = NO_FAULTS) -> tuple[LoopbackStream[Any, Any], FakeEngine]:
    hub: PoolHub[Any, Any] = PoolHub(TARGET_PROTOCOL)
    return LoopbackStream(hub, faults), FakeEngine(hub, echo)


async def positions_after(faults: Faults) -> list[int]:
    """The committed_len of every block that reaches the engine when 200 are sent, in the order of arrival."""
    stream, engine = connect(faults)
    stream.send(submit("a"))
    for position in range(NUM_BLOCKS):
        stream.send(DraftBlock("a", position, (1,)))
        await asyncio.sleep(0)
    for _ in range(2 * faults.max_turns * NUM_BLOCKS):  # turns enough for whatever is still under way
        await asyncio.sleep(0)
    return [command.committed_len for command in engine.commands if isinstance(command, DraftBlock)]


async def test_without_faults_everything_arrives_once_in_order_and_in_batches() -> None:
    stream, engine = connect()
    sink = Sink()
    stream.subscribe("a", sink)
    sent = [submit("a"), *(DraftBlock("a", position, (1,)) for position in range(5))]
    for command in sent:
        stream.send(command)
    assert engine.batches == []  # not within send
    events = await sink.until(5)
    assert engine.batches == [tuple(sent)]
    assert [event.base_len for event in events] == list(range(5))
    await stream.close()


async def test_the_same_seed_gives_the_same_faults_and_another_seed_others() -> None:
    arrivals = await positions_after(SHAKY)
    assert arrivals == await positions_after(SHAKY)
    assert arrivals != await positions_after(Faults(4, 0.2, 0.2, 0.3, 0.2, only=(DraftBlock,)))
    counts = Counter(arrivals)
    assert 0 < NUM_BLOCKS - len(counts) < NUM_BLOCKS // 2  # some dropped
    assert set(counts.values()) == {1, 2}  # some twice
    assert arrivals != sorted(arrivals)  # some overtaken


async def test_a_delay_keeps_the_order_and_a_reordering_does_not() -> None:
    assert await positions_after(Faults(seed=1, delay=0.5)) == list(range(NUM_BLOCKS))
    shuffled = await positions_after(Faults(seed=1, reorder=0.5, only=(DraftBlock,)))
    assert shuffled != sorted(shuffled) == list(range(NUM_BLOCKS))


async def test_faults_spare_the_kinds_of_messages_that_they_are_not_for() -> None:
    stream, engine = connect(Faults(drop=1.0, only=(DraftBlock,)))
    stream.send(submit("a"))
    stream.send(DraftBlock("a", 3, (1,)))
    stream.send(Abort("a"))
    await engine.until_has(Abort("a"))
    assert engine.commands == [submit("a"), Abort("a")]


async def test_faults_hit_events_too() -> None:
    stream, engine = connect(Faults(drop=1.0, only=(Commit,)))
    stream.send(submit("a"))
    stream.send(DraftBlock("a", 3, (1,)))
    await engine.until_has(DraftBlock("a", 3, (1,)))
    sink = Sink()
    stream.subscribe("a", sink)
    engine.hub.publish([Commit("a", 4, (2,)), Refusal("a", RefusalReason.INTERNAL, "")])
    assert await sink.until(1) == [Refusal("a", RefusalReason.INTERNAL, "")]


async def test_turns_can_be_given_a_length_in_seconds() -> None:
    stream, engine = connect(Faults(turn_s=0.001))
    stream.send(submit("a"))
    await asyncio.sleep(0)
    assert engine.commands == []
    await engine.until_has(submit("a"))


async def test_closing_aborts_the_requests_and_loses_what_is_under_way() -> None:
    stream, engine = connect()
    ends: list[StreamClosed] = []
    stream.on_closed(ends.append)
    stream.send(submit("a"))
    await engine.until_has(submit("a"))
    stream.send(submit("never arrives"))
    await stream.close()
    await stream.close()
    assert engine.commands == [submit("a"), Abort("a")]
    assert engine.hub.counters.num_connections == 0
    await asyncio.sleep(0)
    assert [end.cause for end in ends] == [CloseCause.LOCAL]
    with pytest.raises(StreamClosed, match="local"):
        stream.send(submit("b"))


async def test_an_injected_break_ends_the_stream_as_a_lost_connection_does() -> None:
    stream, engine = connect(Faults(close_after=2))
    ends: list[StreamClosed] = []
    stream.on_closed(ends.append)
    stream.send(submit("a"))
    await engine.until_has(submit("a"))
    stream.send(DraftBlock("a", 3, (1,)))
    await stream.closed.wait()  # the answer was one message too many
    await engine.until_has(Abort("a"))
    assert stream.end is not None
    assert stream.end.cause is CloseCause.LOST
    await asyncio.sleep(0)
    assert ends == [stream.end]


async def test_a_send_that_breaks_the_stream_says_so() -> None:
    stream, _ = connect(Faults(close_after=0))
    with pytest.raises(StreamClosed, match="injected fault"):
        stream.send(submit("a"))


async def test_one_failing_callback_does_not_keep_the_others_from_hearing_of_the_end() -> None:
    failures: list[BaseException] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    stream, _ = connect()
    heard: list[StreamClosed] = []
    stream.on_closed(lambda end: [].pop())
    stream.on_closed(heard.append)
    await stream.close()
    await asyncio.sleep(0)
    assert [type(failure) for failure in failures] == [IndexError]
    assert len(heard) == 1


@given(st.integers(0, 2**32), st.lists(st.booleans(), max_size=50))
def test_a_schedule_never_delivers_early_nor_later_than_its_delays_allow(seed: int, eligible: list[bool]) -> None:
    faults = Faults(seed, drop=0.3, duplicate=0.3, reorder=0.3, delay=0.3, max_turns=4, only=(DraftBlock,))
    schedule = FaultSchedule(faults, "up")
    for turn, is_block in enumerate(eligible):
        due = schedule.due(DraftBlock("a", 3, ()) if is_block else Abort("a"), turn)
        assert all(turn < arrival <= turn + 1 + 4 * (len(eligible) + 2) for arrival in due)
        assert len(due) <= 2 if is_block else len(due) == 1
