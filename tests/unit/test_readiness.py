"""What /ready goes by."""

from __future__ import annotations

import asyncio

import pytest

from cluster.messages.answer import ErrorKind, RequestError
from cluster.transport.readiness import PROOF_LASTS_S, Readiness
from tests.fakes import FakeBackend

pytestmark = pytest.mark.unit


def refusing(kind: ErrorKind) -> FakeBackend:
    return FakeBackend(script=[RequestError(kind, "no")])


async def test_a_fresh_proof_needs_no_other_one_and_an_old_one_does() -> None:
    now = [0.0]
    backend = FakeBackend()
    looks = Readiness(lambda: backend, lambda: now[0])
    for now[0], num_requests in ((0.0, 2), (PROOF_LASTS_S - 0.1, 2), (PROOF_LASTS_S, 4)):
        assert await looks.problem() is None
        assert len(backend.requests) == num_requests


async def test_many_who_ask_at_once_share_one_look() -> None:
    backend = FakeBackend()
    looks = Readiness(lambda: backend)
    assert await asyncio.gather(*(looks.problem() for _ in range(10))) == [None] * 10
    assert len(backend.requests) == len(backend.models())


async def test_one_who_asks_and_goes_away_does_not_end_the_look_of_the_others() -> None:
    backend = FakeBackend(script=[None])
    looks = Readiness(lambda: backend)
    first, second = asyncio.create_task(looks.problem()), asyncio.create_task(looks.problem())
    await backend.waiting.wait()
    first.cancel()
    await asyncio.wait([first])
    assert not second.done()
    second.cancel()


async def test_no_room_is_no_reason_to_take_a_router_away() -> None:
    assert await Readiness(lambda: refusing(ErrorKind.OVERLOADED)).problem() is None


async def test_a_failure_is_named_and_looked_at_again_at_once() -> None:
    backend = refusing(ErrorKind.UNAVAILABLE)
    looks = Readiness(lambda: backend)
    assert await looks.problem() == "demo: no"
    assert await looks.problem() == "demo: no"
    assert len(backend.requests) == 2


async def test_a_model_that_hangs_is_not_waited_for_beyond_the_limit() -> None:
    backend = FakeBackend(script=[None])
    assert await Readiness(lambda: backend, timeout_s=0.01).problem() == "demo: no token within 0.01 s"
    assert await backend.closed.get() == backend.requests[0].request_id
