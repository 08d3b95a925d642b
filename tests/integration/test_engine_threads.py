"""Engines on their own threads, with commands from many others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from cluster.messages.answer import FinishReason
from cluster.messages.rounds import Abort, Commit, DraftEvent, PoolLoad, Refusal, RefusalReason, Submit, TargetEvent
from cluster.runtime.engine_loop import EngineError
from tests.engines import Pool, TinyRouter, draft_pool, plain_output, target_pool
from tests.fakes import sampling

pytestmark = pytest.mark.integration

TIMEOUT_S = 30.0


class LiveRouter(TinyRouter):
    """A TinyRouter between engines that run by themselves: it forwards every event from the thread that it came on."""

    def __init__(self, target: Pool, draft: Pool) -> None:
        super().__init__(target, draft)
        self._changed = threading.Condition(threading.RLock())

    def submit(self, submit: Submit) -> None:
        with self._changed:
            super().submit(submit)

    def on_target(self, events: list[TargetEvent]) -> None:
        with self._changed:
            super().on_target(events)
            self.forward()
            self._changed.notify_all()

    def on_draft(self, events: list[DraftEvent]) -> None:
        with self._changed:
            super().on_draft(events)
            self.forward()
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, TIMEOUT_S)


@contextmanager
def running(target: Pool, draft: Pool) -> Iterator[LiveRouter]:
    router = LiveRouter(target, draft)
    target.engine.start()
    draft.engine.start()
    try:
        yield router
    finally:
        target.engine.stop()
        draft.engine.stop()


def request(request_id: str, max_tokens: int = 24, **fields: float) -> Submit:
    return Submit(request_id, tuple(range(1, 8)), sampling(max_tokens, ignore_eos=True), max_draft_tokens=4, **fields)


def test_eight_threads_submit_and_every_output_is_right() -> None:
    target, draft = target_pool(num_blocks=64, max_hold_s=0.02), draft_pool(0.7, num_blocks=64)
    with running(target, draft) as router:
        requests = [[request(f"r{thread}.{index}") for index in range(8)] for thread in range(8)]
        threads = [
            threading.Thread(target=lambda mine=mine: [router.submit(one) for one in mine])  # type: ignore[misc]
            for mine in requests
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        everything = [one for mine in requests for one in mine]
        router.wait_for(lambda: all(router.is_finished(one.request_id) for one in everything))
        assert [target.output(one.request_id) for one in everything] == [plain_output(one) for one in everything]
        assert draft.engine.drain(TIMEOUT_S)
        assert target.engine.drain(TIMEOUT_S)
    assert target.is_free()
    assert draft.is_free()
    assert target.engine.faults.total == draft.engine.faults.total == 0


def test_a_held_or_idle_engine_sleeps() -> None:
    num_readings = 0

    def clock() -> float:
        nonlocal num_readings
        num_readings += 1
        return time.monotonic()

    target = target_pool(clock=clock, max_hold_s=0.1)
    with running(target, draft_pool()) as router:
        target.engine.handle([request("r", max_tokens=4)])  # nobody drafts, so that each token is held for its block
        router.wait_for(lambda: router.is_finished("r"))
    assert target.output("r") == plain_output(request("r", max_tokens=4))
    assert num_readings < 200


def test_the_last_change_of_load_is_told_without_another_command() -> None:
    target = target_pool()
    with running(target, draft_pool()) as router:
        target.engine.handle([Submit("r", (1, 2, 3), sampling(8, ignore_eos=True))])
        router.wait_for(lambda: router.is_finished("r"))
        router.wait_for(lambda: (target.of(PoolLoad) or [None])[-1] == target.engine.load())
        assert target.engine.load().num_free_blocks == target.engine.load().num_total_blocks


def test_a_drain_refuses_new_requests_and_lets_running_ones_finish() -> None:
    target = target_pool()
    with running(target, draft_pool()) as router:
        target.engine.handle([request("old")])  # held for its first block, which nobody drafts
        router.wait_for(lambda: target.output("old") != ())
        results: list[bool] = []
        drain = threading.Thread(target=lambda: results.append(target.engine.drain(TIMEOUT_S)))
        drain.start()
        router.wait_for(lambda: any(load.draining for load in target.of(PoolLoad)))
        target.engine.handle([request("new")])
        router.wait_for(lambda: router.is_finished("new"))
        assert [refusal.reason for refusal in target.of(Refusal)] == [RefusalReason.DRAINING]
        assert not router.is_finished("old")
        target.engine.handle([Abort("old")])
        drain.join(TIMEOUT_S)
        assert results == [True]
        assert target.of(Commit)[-1].finish_reason is FinishReason.CANCELLED


def test_a_drain_that_takes_too_long_hands_over_what_is_left() -> None:
    target = target_pool()
    with running(target, draft_pool()) as router:
        target.engine.handle([request("r")])
        router.wait_for(lambda: target.output("r") != ())
        assert not target.engine.drain(0.01)
        assert [(refusal.request_id, refusal.reason) for refusal in target.of(Refusal)] == [
            ("r", RefusalReason.DRAINING)
        ]
        assert target.is_free()


def test_an_engine_whose_thread_dies_answers_everyone_and_is_unhealthy(caplog: pytest.LogCaptureFixture) -> None:
    target = target_pool()

    def broken(step: object, message: str) -> None:
        raise ZeroDivisionError("a bug")

    def fail(step: object) -> None:
        raise RuntimeError("a fault")

    target.engine._work.fail = broken  # only a bug in the engine itself can end its thread
    target.runner.before_step = fail
    with running(target, draft_pool()) as router:
        target.engine.check_health()
        target.engine.handle([request("a")])
        router.wait_for(lambda: router.is_finished("a"))
        with pytest.raises(EngineError, match="a bug"):
            target.engine.check_health()
        target.engine.handle([request("b")])
        router.wait_for(lambda: router.is_finished("b"))
    assert {refusal.reason for refusal in target.of(Refusal)} == {RefusalReason.DRAINING}
    assert len(caplog.records) == 2


def test_an_engine_is_started_once() -> None:
    target = target_pool()
    with pytest.raises(RuntimeError, match="started"):
        target.engine.drain(1.0)
    target.engine.start()
    with pytest.raises(RuntimeError, match="once"):
        target.engine.start()
    target.engine.stop()
    target.engine.stop()
