"""Which connection a command or an event belongs to, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    SetDraftLimit,
)
from cluster.transport.draft_stream import DraftOwners
from cluster.transport.hub import PoolHub
from cluster.transport.target_stream import TARGET_PROTOCOL, TargetOwners
from tests.streams import FakeEngine, submit

pytestmark = pytest.mark.unit


class Inbox:
    """A connection that keeps what it is sent."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def deliver(self, events: Sequence[Any], /) -> None:
        self.events.extend(events)


def last(request_id: str) -> Commit:
    return Commit(request_id, 3, (), finish_reason=FinishReason.CANCELLED)


def opened(request_id: str, epoch: int) -> Open:
    return Open(request_id, epoch, (1, 2), SamplingParams(max_tokens=4, seed=0))


# --- targets ---------------------------------------------------------------------------------------------------------


def test_a_connection_commands_only_its_own_requests() -> None:
    owners, mine, theirs = TargetOwners(), Inbox(), Inbox()
    assert owners.admit(mine, submit("a")) == (submit("a"),)
    assert owners.admit(theirs, DraftBlock("a", 3, (4,))) == ()
    assert owners.admit(theirs, Abort("a")) == ()
    assert owners.admit(mine, DraftBlock("unknown", 3, (4,))) == ()
    assert owners.admit(mine, DraftBlock("a", 3, (4,))) == (DraftBlock("a", 3, (4,)),)
    assert owners.admit(theirs, SetDraftLimit("a", 3)) == ()
    assert owners.admit(mine, SetDraftLimit("a", 3)) == (SetDraftLimit("a", 3),)


def test_a_repeated_submit_is_dropped_and_the_request_runs_on() -> None:
    owners, mine = TargetOwners(), Inbox()
    owners.admit(mine, submit("a"))
    assert owners.admit(mine, submit("a")) == ()
    assert owners.recipient(Commit("a", 3, (4,))) is mine


@pytest.mark.parametrize("event", [last("a"), Refusal("a", RefusalReason.INTERNAL, "")])
def test_a_request_is_forgotten_with_its_last_event(event: Commit | Refusal) -> None:
    owners, mine = TargetOwners(), Inbox()
    owners.admit(mine, submit("a"))
    assert owners.recipient(event) is mine
    assert owners.recipient(Commit("a", 3, (4,))) is None
    assert owners.leave(mine) == []
    assert owners.admit(mine, submit("a")) == (submit("a"),)


def test_an_aborted_request_still_tells_its_router_how_it_ended() -> None:
    owners, mine = TargetOwners(), Inbox()
    owners.admit(mine, submit("a"))
    assert owners.admit(mine, Abort("a")) == (Abort("a"),)
    assert owners.admit(mine, Abort("a")) == ()
    assert owners.recipient(last("a")) is mine


def test_a_leaving_connection_aborts_what_runs_and_hears_no_more() -> None:
    owners, mine, theirs = TargetOwners(), Inbox(), Inbox()
    for request_id in ("a", "b"):
        owners.admit(mine, submit(request_id))
    owners.admit(theirs, submit("c"))
    owners.admit(mine, Abort("b"))
    assert owners.leave(mine) == [Abort("a")]
    assert owners.recipient(Commit("a", 3, (4,))) is None
    assert owners.recipient(Commit("c", 3, (4,))) is theirs


def test_the_end_of_a_lost_run_is_not_taken_for_the_end_of_the_next_run_of_its_request() -> None:
    owners, lost, again = TargetOwners(), Inbox(), Inbox()
    owners.admit(lost, submit("a"))
    owners.leave(lost)
    assert owners.admit(again, submit("a")) == (submit("a"),)
    assert owners.recipient(Commit("a", 3, (4,))) is None  # computed before the engine saw the abort
    assert owners.recipient(last("a")) is None
    assert owners.recipient(Commit("a", 3, (4,))) is again
    assert owners.recipient(last("a")) is again


def test_a_submit_from_another_connection_takes_the_request_over() -> None:
    owners, old, new = TargetOwners(), Inbox(), Inbox()
    owners.admit(old, submit("a"))
    assert owners.admit(new, submit("a")) == (Abort("a"), submit("a"))
    assert owners.leave(old) == []
    assert owners.recipient(last("a")) is None
    assert owners.recipient(Commit("a", 3, (4,))) is new


@given(st.lists(st.tuples(st.sampled_from("sabelx"), st.sampled_from([0, 1]), st.sampled_from("pq")), max_size=40))
def test_an_engine_that_ends_each_submit_once_leaves_no_owner_behind(moves: list[tuple[str, int, str]]) -> None:
    """Moves: submit, abort, block, engine ends the oldest run, leave, stray event."""
    owners, connections = TargetOwners(), (Inbox(), Inbox())
    unended: list[str] = []  # what the engine has yet to end, in order

    def pass_on(commands: Sequence[Any]) -> None:
        unended.extend(command.request_id for command in commands if not isinstance(command, Abort | DraftBlock))

    for move, index, request_id in moves:
        connection = connections[index]
        if move == "s":
            pass_on(owners.admit(connection, submit(request_id)))
        elif move in "ab":
            pass_on(owners.admit(connection, Abort(request_id) if move == "a" else DraftBlock(request_id, 3, ())))
        elif move == "l":
            pass_on(owners.leave(connection))
        elif move == "e" and unended:
            owners.recipient(last(unended.pop(0)))
        else:
            owners.recipient(Commit(request_id, 3, (4,)))
    for connection in connections:
        owners.leave(connection)
    for request_id in unended:
        assert owners.recipient(last(request_id)) is None
    assert owners._runs == {}


# --- drafts ----------------------------------------------------------------------------------------------------------


def test_a_session_lasts_from_open_to_close() -> None:
    owners, mine, theirs = DraftOwners(), Inbox(), Inbox()
    assert owners.admit(mine, opened("a", 1)) == (opened("a", 1),)
    commit = Committed("a", 1, 2, (3,), 4)
    assert owners.admit(mine, commit) == (commit,)
    assert owners.admit(theirs, commit) == ()
    assert owners.recipient(DraftBlock("a", 3, (4,), 1)) is mine
    assert owners.admit(mine, Close("a")) == (Close("a"),)
    assert owners.recipient(DraftBlock("a", 3, (4,), 1)) is None
    assert owners.admit(mine, commit) == ()


def test_a_newer_open_takes_over_and_an_older_one_is_stale() -> None:
    owners, old, new = DraftOwners(), Inbox(), Inbox()
    owners.admit(old, opened("a", 1))
    assert owners.admit(new, opened("a", 2)) == (opened("a", 2),)
    assert owners.admit(old, opened("a", 1)) == ()
    assert owners.leave(old) == []
    assert owners.recipient(DraftBlock("a", 3, (4,), 1)) is None
    assert owners.recipient(Refusal("a", RefusalReason.INTERNAL, "", 1)) is None
    assert owners.recipient(DraftBlock("a", 3, (4,), 2)) is new


def test_a_refused_session_is_over() -> None:
    owners, mine = DraftOwners(), Inbox()
    owners.admit(mine, opened("a", 1))
    assert owners.recipient(Refusal("a", RefusalReason.QUEUE_FULL, "", 1)) is mine
    assert owners.leave(mine) == []


def test_a_leaving_connection_closes_its_sessions() -> None:
    owners, mine, theirs = DraftOwners(), Inbox(), Inbox()
    owners.admit(mine, opened("a", 1))
    owners.admit(theirs, opened("b", 1))
    assert owners.leave(mine) == [Close("a")]
    assert owners.leave(theirs) == [Close("b")]


# --- the hub ---------------------------------------------------------------------------------------------------------


async def test_the_hub_hands_a_batch_of_events_over_once_and_keeps_their_order() -> None:
    hub = PoolHub(TARGET_PROTOCOL)
    FakeEngine(hub)
    inbox = Inbox()
    hub.attach(inbox)
    for request_id in ("a", "b"):
        hub.receive(inbox, TARGET_PROTOCOL.decode_commands(TARGET_PROTOCOL.encode_command(submit(request_id))))
    load = PoolLoad(2, 0, 1, 2, 1)
    events = [Commit("a", 3, (4,)), load, Commit("b", 3, (5,)), Commit("stray", 3, (6,))]
    hub.publish(events)
    assert inbox.events == []
    hub._loop.call_soon(events.clear)  # runs right after the hand-over: the batch was copied
    await hub._loop.run_in_executor(None, bool)
    assert inbox.events == [Commit("a", 3, (4,)), load, Commit("b", 3, (5,))]
    assert hub.counters.num_unclaimed_events == 1


async def test_a_connection_that_has_left_can_no_longer_command() -> None:
    hub = PoolHub(TARGET_PROTOCOL)
    engine, inbox = FakeEngine(hub), Inbox()
    frame = TARGET_PROTOCOL.decode_commands(TARGET_PROTOCOL.encode_command(submit("a")))
    hub.attach(inbox)
    hub.receive(inbox, frame)
    hub.detach(inbox)
    hub.detach(inbox)
    hub.receive(inbox, frame)
    assert engine.commands == [submit("a"), Abort("a")]


async def test_an_unbound_hub_says_so() -> None:
    hub = PoolHub(TARGET_PROTOCOL)
    inbox = Inbox()
    hub.attach(inbox)
    with pytest.raises(RuntimeError, match="bound to an engine"):
        hub.receive(inbox, TARGET_PROTOCOL.decode_commands(TARGET_PROTOCOL.encode_command(submit("a"))))


def test_a_repeated_open_is_dropped() -> None:
    owners, mine = DraftOwners(), Inbox()
    assert owners.admit(mine, opened("a", 1)) == (opened("a", 1),)
    assert owners.admit(mine, opened("a", 1)) == ()
    assert owners.admit(mine, opened("a", 2)) == (opened("a", 2),)
