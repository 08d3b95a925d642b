"""A runner that is lost ends its engine, which refuses everything so that routers go elsewhere."""

from __future__ import annotations

import threading

import pytest

from cluster.core.step import SchedulerOutput
from cluster.messages.rounds import Refusal, RefusalReason, Submit
from cluster.runtime.engine_loop import EngineError
from cluster.runtime.work import RunnerLost
from tests.engines import Pool, target_pool
from tests.fakes import sampling

pytestmark = pytest.mark.unit


def refusals(pool: Pool) -> list[tuple[str, RefusalReason]]:
    return [(event.request_id, event.reason) for event in pool.of(Refusal)]


def test_a_step_that_loses_the_runner_ends_the_engine_at_once() -> None:
    pool, closed = target_pool(), threading.Event()

    def lose(step: SchedulerOutput) -> None:
        raise RunnerLost("rank 1 has ended")

    pool.runner.before_step = lose
    pool.engine.on_closed = closed.set
    pool.engine.handle([Submit("a", (3, 4), sampling()), Submit("b", (5,), sampling())])
    pool.engine.start()
    assert closed.wait(30)
    with pytest.raises(EngineError, match="rank 1 has ended"):
        pool.engine.check_health()
    assert sorted(refusals(pool)) == [("a", RefusalReason.DRAINING), ("b", RefusalReason.DRAINING)]
    assert pool.is_free()


def test_an_idle_engine_is_told_that_its_runner_is_lost() -> None:
    pool = target_pool()
    pool.engine.start()
    pool.engine.check_health()
    pool.engine.abandon(RunnerLost("rank 1 does not answer"))
    with pytest.raises(EngineError, match="rank 1 does not answer"):
        pool.engine.check_health()
    pool.engine.stop()
    pool.engine.handle([Submit("late", (3,), sampling())])
    assert refusals(pool) == [("late", RefusalReason.DRAINING)]
