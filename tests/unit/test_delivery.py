"""From commits to what a client reads."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.messages.answer import ErrorKind, FinishReason, RequestError, TokenDelta, TokenLogprobs
from cluster.messages.rounds import Commit
from cluster.router.delivery import Delivery
from cluster.router.observer import TokensDelivered
from cluster.tokenizer import IncrementalDetokenizer
from tests.fakes import byte_tokenizer
from tests.toy_cluster import RecordingObserver, request

pytestmark = pytest.mark.unit


class Desk:
    """A delivery on a clock that moves when told to."""

    def __init__(self, **fields: Any) -> None:
        self.now = 10.0
        self.observer = RecordingObserver()
        self.tokenizer = byte_tokenizer()
        item = request(**fields)
        self.base_len = len(item.prompt_token_ids)
        self.delivery = Delivery(
            item, IncrementalDetokenizer(self.tokenizer, item.sampling.stop), self.observer, lambda: self.now
        )

    def push(self, data: bytes | str, finish_reason: FinishReason | None = None, **fields: Any) -> None:
        ids = {self.tokenizer.token_bytes(token_id): token_id for token_id in range(256)}
        data = data.encode() if isinstance(data, str) else data
        token_ids = tuple(ids[bytes([byte])] for byte in data)
        logprobs = tuple(TokenLogprobs(token_id, -1.0) for token_id in token_ids)
        self.delivery.push(
            Commit("r", self.base_len, token_ids, finish_reason=finish_reason, logprobs=logprobs, **fields)
        )
        self.base_len += len(token_ids)

    async def read(self, count: int = 1) -> list[TokenDelta]:
        return [await self.delivery.next_delta() for _ in range(count)]


async def test_commits_are_decoded_only_after_this_turn_of_the_loop() -> None:
    desk = Desk()
    desk.push("ab")
    assert desk.observer.events == []
    await asyncio.sleep(0)
    assert [event.num_tokens for event in desk.observer.of(TokensDelivered)] == [2]


async def test_a_stop_string_cuts_text_tokens_and_logprobs_at_the_same_place() -> None:
    desk = Desk(stop=("cd",))
    stopped: list[bool] = []
    desk.delivery.on_stop = lambda: stopped.append(True)
    desk.push("abcdef", num_draft_tokens=5, num_accepted_tokens=5)
    (delta,) = await desk.read()
    assert (delta.text, len(delta.token_ids), delta.stop_reason) == ("ab", 4, "cd")
    assert delta.logprobs is not None
    assert [item.token_id for item in delta.logprobs] == list(delta.token_ids)
    assert delta.stats is not None
    assert (delta.stats.completion_tokens, delta.stats.num_steps, delta.stats.num_draft_tokens) == (4, 1, 5)
    assert stopped == [True]


async def test_nothing_follows_the_last_delta() -> None:
    desk = Desk(stop=("b",))
    desk.push("ab")
    desk.push("more")
    await desk.read()
    desk.delivery.end(FinishReason.DEADLINE)
    desk.delivery.fail(RequestError(ErrorKind.INTERNAL, "too late"))
    assert desk.delivery.is_over
    assert desk.delivery._queue.empty()


async def test_text_that_may_become_a_stop_string_is_held_back_and_released_at_the_end() -> None:
    desk = Desk(stop=("xyz",))
    desk.push("ax")
    desk.push("y", FinishReason.LENGTH)
    first, last = await desk.read(2)
    assert (first.text, last.text, last.finish_reason) == ("a", "xy", FinishReason.LENGTH)


async def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    desk = Desk()
    desk.push("é".encode()[:1])
    desk.push("", FinishReason.LENGTH)
    first, last = await desk.read(2)
    assert (first.text, last.text) == ("", "\ufffd")


async def test_ending_early_delivers_what_was_committed_first() -> None:
    desk = Desk()
    desk.push("ab")
    desk.delivery.end(FinishReason.DEADLINE)
    first, last = await desk.read(2)
    assert (first.text, last.token_ids, last.finish_reason) == ("ab", (), FinishReason.DEADLINE)
    assert last.stats is not None
    assert last.stats.completion_tokens == 2


async def test_an_error_comes_after_what_was_committed() -> None:
    desk = Desk()
    desk.push("ab")
    desk.delivery.fail(RequestError(ErrorKind.UNAVAILABLE, "gone"))
    assert (await desk.read())[0].text == "ab"
    with pytest.raises(RequestError, match="gone"):
        await desk.delivery.next_delta()


async def test_times_are_measured_when_tokens_become_ready() -> None:
    desk = Desk()
    for step in (0.5, 0.25, 0.25):
        desk.now += step
        desk.push("ab")
        await asyncio.sleep(0)
    assert [(event.interval_s, event.first) for event in desk.observer.of(TokensDelivered)] == [
        (0.5, True),
        (0.25, False),
        (0.25, False),
    ]
    assert desk.delivery.marks.ttft_s == 0.5
    assert desk.delivery.marks.tpot_s(6) == pytest.approx(0.1)
    assert desk.delivery.marks.tpot_s(1) is None


async def test_a_target_that_stopped_by_itself_is_not_aborted() -> None:
    desk = Desk(stop=("b",))
    stopped: list[bool] = []
    desk.delivery.on_stop = lambda: stopped.append(True)
    desk.push("ab", FinishReason.LENGTH)
    assert (await desk.read())[0].finish_reason is FinishReason.STOP
    assert stopped == []
