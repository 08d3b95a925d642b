"""What waits for the wire: joined, bounded, in order."""

from __future__ import annotations

import asyncio

import pytest

from cluster.transport.outbox import Outbox, OutboxFull

pytestmark = pytest.mark.unit


def put_many(outbox: Outbox, parts: list[bytes]) -> None:
    for part in parts:
        outbox.put(part)


async def test_what_is_put_in_one_turn_is_taken_as_one_frame() -> None:
    outbox = Outbox(limit_bytes=1000, frame_bytes=100)
    taker = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    for part in (b"a", b"b", b"c"):
        outbox.put(part)
    assert await taker == b"abc"
    assert outbox.num_bytes == 0


async def test_frames_stay_below_their_size_and_a_larger_part_travels_alone() -> None:
    outbox = Outbox(limit_bytes=1000, frame_bytes=5)
    for part in (b"aa", b"bb", b"cc", b"dddddddd", b"e"):
        outbox.put(part)
    assert [await outbox.take() for _ in range(4)] == [b"aabb", b"cc", b"dddddddd", b"e"]


async def test_a_full_outbox_refuses_and_keeps_what_it_has() -> None:
    outbox = Outbox(limit_bytes=200, frame_bytes=1000)
    outbox.put(b"a" * 30)
    outbox.put(b"b" * 30)
    with pytest.raises(OutboxFull, match="200 bytes"):
        outbox.put(b"c" * 30)
    assert outbox.num_bytes <= 200
    assert await outbox.take() == b"a" * 30 + b"b" * 30
    outbox.put(b"room again")


async def test_many_empty_parts_fill_it_too() -> None:
    outbox = Outbox(limit_bytes=1000, frame_bytes=1000)
    with pytest.raises(OutboxFull):
        put_many(outbox, [b""] * 1000)


async def test_a_finished_outbox_gives_what_is_left_then_none() -> None:
    outbox = Outbox(limit_bytes=1000, frame_bytes=1000)
    outbox.put(b"last")
    outbox.finish()
    assert await outbox.take() == b"last"
    assert await outbox.take() is None


async def test_finishing_wakes_a_waiting_writer() -> None:
    outbox = Outbox(limit_bytes=1000, frame_bytes=1000)
    taker = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.finish()
    assert await taker is None


async def test_clearing_forgets_what_waits() -> None:
    outbox = Outbox(limit_bytes=1000, frame_bytes=1000)
    outbox.put(b"gone")
    outbox.clear()
    outbox.finish()
    assert outbox.num_bytes == 0
    assert await outbox.take() is None
