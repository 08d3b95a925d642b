"""The engines' loop, stepped by hand."""

import logging

import pytest

from cluster.core.scheduler import Scheduler
from cluster.core.step import StepOutput
from cluster.messages.answer import FinishReason
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
from cluster.runtime.engine_loop import MAX_FAILED_STEPS, EngineError
from tests.engines import draft_pool, plain_output, target_pool
from tests.fakes import sampling

pytestmark = pytest.mark.unit


def submit(request_id="r", num_tokens=5, max_tokens=6, **fields):
    return Submit(request_id, tuple(range(1, 1 + num_tokens)), sampling(max_tokens, ignore_eos=True), **fields)


def test_a_request_runs_to_its_end():
    pool = target_pool()
    pool.engine.handle([submit()])
    pool.run()
    assert pool.output("r") == plain_output(submit())
    assert pool.of(Commit)[-1].finish_reason is FinishReason.LENGTH
    assert pool.is_free()


def test_all_events_of_a_step_come_in_one_call():
    pool = target_pool(prefix_cache=False)  # else one prompt would wait for the other, which begins like it
    calls = []
    pool.engine.on_events = calls.append
    pool.engine.handle([submit("a"), submit("b")])
    pool.engine.step()
    assert [[type(event) for event in call] for call in calls] == [[Commit, Commit, PoolLoad]]


def test_refusals_do_not_wait_for_the_model():
    pool = target_pool()
    pool.engine.handle([submit("a"), submit("b", num_tokens=0)])
    seen = []
    pool.runner.before_step = lambda step: seen.extend(pool.of(Refusal))
    pool.engine.step()
    assert [refusal.request_id for refusal in seen] == ["b"]


def test_an_idle_engine_asks_not_to_be_called_before_a_command():
    assert target_pool().engine.step() is None


def test_a_held_sequence_tells_when_to_be_called_again():
    pool = target_pool(clock=lambda: 10.0, max_hold_s=3.0)
    pool.engine.handle([submit(max_draft_tokens=4)])
    pool.engine.step()
    assert pool.engine.step() == 13.0


def test_a_repeated_submission_is_dropped():
    pool = target_pool()
    pool.engine.handle([submit(), submit()])
    pool.run()
    assert pool.of(Refusal) == []
    assert pool.output("r") == plain_output(submit())


def test_load_is_told_when_it_changes_but_not_too_often():
    now = 0.0
    pool = target_pool(clock=lambda: now)
    pool.engine.step()
    pool.engine.step()
    assert len(pool.of(PoolLoad)) == 1
    pool.engine.handle([submit(max_tokens=100)])
    pool.engine.step()
    assert len(pool.of(PoolLoad)) == 1
    now = 0.2
    pool.engine.step()
    assert [load.num_running for load in pool.of(PoolLoad)] == [0, 1]


def test_statistics_count_what_a_step_verified():
    pool = target_pool()
    steps = []
    pool.engine.on_step = steps.append
    request = submit(max_tokens=20, max_draft_tokens=3)
    truth = plain_output(request)
    pool.engine.handle([request])
    pool.engine.step()
    pool.engine.handle([DraftBlock("r", 6, (truth[1], truth[2], truth[3] + 1))])
    pool.engine.step()
    step = steps[-1]
    assert (step.num_scheduled_tokens, step.num_draft_tokens, step.num_accepted_tokens) == (4, 3, 2)
    assert (step.num_emitted_tokens, step.num_verified_sequences) == (3, 1)
    assert step.accepted_per_position == (1, 1)
    assert step.scheduler == pool.engine.stats()


def fail_once(pool):
    def fail(step):
        pool.runner.before_step = lambda step: None
        raise RuntimeError("out of memory")

    pool.runner.before_step = fail


def test_a_failing_step_refuses_its_batch_and_the_engine_serves_on():
    pool = target_pool(max_num_seqs=1)
    fail_once(pool)
    pool.engine.handle([submit("a"), submit("b")])
    pool.run()
    assert [(refusal.request_id, refusal.reason) for refusal in pool.of(Refusal)] == [("a", RefusalReason.INTERNAL)]
    assert "out of memory" in pool.of(Refusal)[0].message
    assert pool.output("b") == plain_output(submit("b"))
    assert pool.is_free()
    pool.engine.check_health()


def test_a_failing_draft_step_closes_its_sessions_and_the_engine_serves_on():
    pool = draft_pool()
    fail_once(pool)
    pool.engine.handle([Open("a", 3, (1, 2), sampling(), 2)])
    pool.run()
    assert pool.of(Refusal)[0].epoch == 3
    pool.engine.handle([Open("a", 4, (1, 2), sampling(), 2)])
    pool.run()
    assert [block.epoch for block in pool.of(DraftBlock)] == [4]


def spoil(pool, request_id):
    """Make the model's output for one request impossible to sample."""
    execute = pool.runner.execute

    def spoiled(step, should_stop):
        output = execute(step, should_stop)
        samples = {key: value for key, value in output.samples.items() if key != request_id}
        return StepOutput(samples, {request_id: "NaN"} if len(samples) < len(output.samples) else {})

    pool.runner.execute = spoiled


def test_a_request_that_cannot_be_sampled_ends_alone():
    pool = target_pool()
    spoil(pool, "a")
    pool.engine.handle([submit("a"), submit("b")])
    pool.run()
    assert [(refusal.request_id, refusal.message) for refusal in pool.of(Refusal)] == [("a", "NaN")]
    assert pool.output("b") == plain_output(submit("b"))
    assert pool.is_free()
    assert pool.engine.faults.total == 1


def test_a_session_that_cannot_be_sampled_ends_alone():
    pool = draft_pool()
    spoil(pool, "a")
    pool.engine.handle([Open(request_id, 0, (1, 2), sampling(), 2) for request_id in ("a", "b")])
    pool.run()
    assert [(refusal.request_id, refusal.message) for refusal in pool.of(Refusal)] == [("a", "NaN")]
    assert [block.request_id for block in pool.of(DraftBlock)] == ["b"]


def test_the_same_fault_is_logged_once_and_counted(caplog):
    pool = target_pool()

    def fail(step):
        raise RuntimeError("out of memory")

    pool.runner.before_step = fail
    for index in range(MAX_FAILED_STEPS):
        pool.engine.check_health()
        pool.engine.handle([submit(f"r{index}")])
        pool.run()
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    assert pool.engine.faults.total == MAX_FAILED_STEPS
    with pytest.raises(EngineError, match="steps failed"):
        pool.engine.check_health()


def test_a_command_that_fails_is_refused_and_the_others_are_served():
    pool = target_pool()
    pool.engine.handle([Submit("bad", None, sampling()), submit("good")])
    pool.run()
    assert pool.output("good") == plain_output(submit("good"))
    assert [(refusal.request_id, refusal.reason) for refusal in pool.of(Refusal)] == [("bad", RefusalReason.INTERNAL)]
    assert pool.is_free()


def test_a_proposal_that_fails_is_only_a_lost_hint():
    pool = target_pool()
    pool.engine.handle([submit(max_draft_tokens=4), DraftBlock("r", 5, ("x",))])
    while not pool.is_free() or not pool.output("r"):
        pool.engine.step()
        pool.engine.handle([DraftBlock("r", 5 + len(pool.output("r")), ())])
    assert pool.output("r") == plain_output(submit())
    assert pool.of(Refusal) == []
    assert pool.engine.faults.total == 1


def test_a_fault_in_scheduling_refuses_everyone_and_the_engine_serves_on(monkeypatch):
    pool = target_pool()
    pool.engine.handle([submit("a"), submit("b")])
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "schedule", lambda self, now: 1 / 0)
        pool.engine.step()
    assert [(refusal.request_id, refusal.reason) for refusal in pool.of(Refusal)] == [
        ("a", RefusalReason.INTERNAL),
        ("b", RefusalReason.INTERNAL),
    ]
    pool.engine.handle([submit("c")])
    pool.run()
    assert pool.output("c") == plain_output(submit("c"))


@pytest.mark.parametrize("listener", ["on_events", "on_step"])
def test_a_failing_listener_does_not_end_a_request(listener):
    pool = target_pool()

    def fail(what):
        raise ValueError("no room")

    setattr(pool.engine, listener, fail)
    pool.engine.handle([submit()])
    pool.run()
    assert pool.engine.stats().num_running == 0
    assert pool.engine.faults.total > 0
    assert pool.is_free()


@pytest.mark.parametrize(
    ("pool", "commands", "answered"),
    [
        (target_pool(), [submit("a"), Abort("b"), DraftBlock("c", 1, ())], ["a"]),
        (draft_pool(), [Open("a", 1, (1,), sampling()), Close("b"), Committed("c", 0, 1, (), 1)], ["a", "c"]),
    ],
    ids=["target", "draft"],
)
def test_a_stopped_engine_refuses_at_once(pool, commands, answered):
    pool.engine.stop()
    pool.engine.handle(commands)
    refusals = pool.of(Refusal)
    assert [refusal.request_id for refusal in refusals] == answered
    assert {refusal.reason for refusal in refusals} == {RefusalReason.DRAINING}


def test_stopping_refuses_what_is_left():
    pool = target_pool()
    pool.engine.handle([submit("a", max_tokens=50)])
    pool.engine.step()
    pool.engine.handle([submit("b")])
    pool.engine.stop()
    assert {refusal.request_id for refusal in pool.of(Refusal)} == {"a", "b"}
    assert pool.is_free()
