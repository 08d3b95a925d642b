"""Finished requests on their way from a router to control, over the real stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.finished_request import FinishedRequest, FollowedPolicy, Outcome, RequestGuesses, RequestTimes
from cluster.control.store import Kind
from cluster.messages.answer import RequestError
from cluster.messages.request import Drafter
from cluster.router.control_link import ControlLink
from cluster.router.request_feed import RequestFeed
from cluster.transport.feed_codec import record_from_wire, records_to_wire
from cluster.transport.limits import CodecError
from tests.control_server import TOKEN, control_server
from tests.unit.test_request_feed import event

pytestmark = pytest.mark.contract

SECONDS = st.none() | st.floats(0, 1e6)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
COUNTS = st.integers(0, 1000)
RECORDS = st.builds(
    FinishedRequest,
    st.text("abc", min_size=1, max_size=128),
    st.just(0.0),
    NAMES,
    NAMES,
    NAMES,
    st.sampled_from(Outcome),
    st.floats(0, 2),
    COUNTS,
    COUNTS,
    st.none() | st.builds(FollowedPolicy, COUNTS, COUNTS, NAMES, st.none() | NAMES, st.booleans()),
    st.builds(RequestTimes, SECONDS, SECONDS, SECONDS, SECONDS),
    st.builds(
        RequestGuesses,
        st.sampled_from(Drafter),
        st.none() | NAMES,
        st.booleans(),
        st.none() | st.floats(1, 33),
        st.just((5, 4, 3)),
        st.just((5, 2, 0)),
    ),
)


@given(RECORDS)
def test_a_record_survives_the_wire_on_the_other_ends_clock(record: FinishedRequest) -> None:
    (message,) = records_to_wire([record], now=2.5)
    assert record_from_wire(message, now=2.5) == record
    assert record_from_wire(message, now=1002.5).finished_at == 1000.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", ""),
        ("tenant", "t" * 257),
        ("outcome", "splendid"),
        ("age_s", float("nan")),
        ("age_s", -1.0),
        ("temperature", float("inf")),
    ],
)
def test_a_record_beyond_the_limits_is_refused_by_field(field: str, value: object) -> None:
    (message,) = records_to_wire([FinishedRequest("r", 0.0, "m", "t", "w", Outcome.STOP)], now=0.0)
    setattr(message, field, value)
    with pytest.raises(CodecError, match=field):
        record_from_wire(message, 0.0)


@pytest.mark.parametrize(
    "guesses",
    [
        RequestGuesses(verified_per_position=(1,) * 33, accepted_per_position=(1,) * 33),
        RequestGuesses(verified_per_position=(1, 1), accepted_per_position=(1,)),
        RequestGuesses(verified_per_position=(1,), accepted_per_position=(2,)),
        RequestGuesses(acceptance_length=float("nan")),
    ],
)
def test_guesses_beyond_the_limits_are_refused(guesses: RequestGuesses) -> None:
    (message,) = records_to_wire([FinishedRequest("r", 0.0, "m", "t", "w", Outcome.STOP, guesses=guesses)], now=0.0)
    with pytest.raises(CodecError, match="guesses"):
        record_from_wire(message, 0.0)


# --- over the stream -------------------------------------------------------------------------------------------------


class Heard:
    """What the control service has heard of requests, and a way to wait for more."""

    def __init__(self) -> None:
        self.records: list[FinishedRequest] = []
        self._more = asyncio.Event()

    def __call__(self, records: Sequence[FinishedRequest]) -> None:
        self.records += records
        self._more.set()

    async def until(self, holds: Callable[[list[str]], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds([record.request_id for record in self.records]):
                self._more.clear()
                await self._more.wait()


def link_to(address: Callable[[], str | None], feed: RequestFeed) -> ControlLink:
    async def discover() -> str | None:
        return address()

    return ControlLink("router-1", discover, dict.fromkeys(Kind, lambda snapshot: None), TOKEN, feed)


def is_connected(link: ControlLink) -> bool:
    try:
        link.backend()
    except RequestError:
        return False
    return True


async def test_requests_wait_for_control_and_arrive_once_it_is_there(tmp_path: Path) -> None:
    address: str | None = None
    feed, heard = RequestFeed(lambda: 0.0, batch_s=0.001), Heard()
    link = link_to(lambda: address, feed)
    link.start()
    feed.put(event("early"))
    async with control_server(tmp_path / "control.db") as server:
        server.service.listeners.append(heard)
        address = server.address
        await heard.until(lambda ids: ids == ["early"])
        for number in range(600):
            feed.put(event(f"r{number}"))
        await heard.until(lambda ids: ids == ["early", *(f"r{number}" for number in range(600))])
    assert feed.totals.sent == 601
    async with asyncio.timeout(30):
        while is_connected(link):  # noqa: ASYNC110 - the end of a stream comes by the network
            await asyncio.sleep(0)
    feed.put(event("late"))
    again = Heard()
    async with control_server(tmp_path / "control.db") as server:
        server.service.listeners.append(again)
        address = server.address
        await again.until(lambda ids: ids == ["late"])
    await link.stop()


async def test_a_record_that_is_none_is_left_out_and_the_others_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    feed, heard = RequestFeed(lambda: 0.0, batch_s=0.001), Heard()
    async with control_server(tmp_path / "control.db") as server:
        server.service.listeners.append(heard)
        link = link_to(lambda: server.address, feed)
        for request_id in ("one", "x" * 129, "two"):
            feed.put(event(request_id))
        link.start()
        await heard.until(lambda ids: ids == ["one", "two"])
        await link.stop()
    assert "request_id: must have 1 to 128 characters" in caplog.text
