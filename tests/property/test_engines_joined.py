"""Speculation changes the speed of an output, never the output: engines, sessions and rounds on toy models."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.messages.answer import FinishReason
from cluster.messages.request import DraftLengthMode, HoldMode
from cluster.messages.rounds import Abort, Commit, DraftBlock, Refusal, Submit
from tests.engines import TinyRouter, draft_pool, plain_output, target_pool
from tests.fakes import sampling

pytestmark = pytest.mark.property


class ManualClock:
    """Time that only moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def tick(self) -> None:
        self.now += 0.01


def submissions(count: int, draft_len: int, seed: int, **fields: Any) -> list[Submit]:
    """Random requests, some of whose prompts begin alike."""
    chance = random.Random(seed)
    common = tuple(chance.randrange(1, 50) for _ in range(20))
    return [
        Submit(
            f"r{index}",
            common[: chance.choice((0, 7, 20))] + tuple(chance.randrange(1, 50) for _ in range(chance.randint(1, 20))),
            sampling(
                chance.randint(1, 40), seed=chance.randrange(1 << 64), temperature=chance.choice((0.0, 1.0)), **fields
            ),
            max_draft_tokens=draft_len,
        )
        for index in range(count)
    ]


def unreliable(seed: int) -> Callable[[list[Any]], list[Any]]:
    """Drops, repeats, reorders and delays frames, each with some chance, reproducibly."""
    chance = random.Random(seed)
    late: list[Any] = []

    def pass_on(frames: list[Any]) -> list[Any]:
        passed = [late.pop() for _ in range(len(late)) if chance.random() < 0.5]
        for frame in frames:
            fate = chance.random()
            if fate < 0.1:
                continue
            (late if fate < 0.3 else passed).append(frame)
            if fate > 0.9:
                passed.append(frame)
        if chance.random() < 0.3:
            chance.shuffle(passed)
        return passed

    return pass_on


@pytest.mark.parametrize("draft_len", range(1, 9))
@pytest.mark.parametrize("agreement", [1.0, 0.0, 0.6], ids=["right", "wrong", "fair"])
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no cache"])
def test_output_equals_plain_decoding(draft_len: int, agreement: float, prefix_cache: bool) -> None:
    clock = ManualClock()
    target = target_pool(clock=clock, prefix_cache=prefix_cache)
    draft = draft_pool(agreement, clock=clock, prefix_cache=prefix_cache)
    router = TinyRouter(target, draft)
    requests = submissions(6, draft_len, seed=draft_len)
    for request in requests:
        router.submit(request)
    router.run(clock.tick)
    router.close()
    assert [target.output(request.request_id) for request in requests] == [plain_output(r) for r in requests]
    assert target.is_free()
    assert draft.is_free()
    assert target.engine.faults.total == draft.engine.faults.total == 0
    if agreement == 1.0:
        assert all(commit.num_accepted_tokens == commit.num_draft_tokens for commit in full_commits(target.of(Commit)))
    if agreement == 0.0:
        assert not any(commit.num_accepted_tokens for commit in target.of(Commit))


def full_commits(commits: list[Commit]) -> list[Commit]:
    return [commit for commit in commits if commit.finish_reason is None]


@pytest.mark.parametrize("draft_len", range(1, 9))
def test_a_draft_equal_to_the_target_gives_an_acceptance_length_of_k_plus_one(draft_len: int) -> None:
    clock = ManualClock()
    target, draft = target_pool(clock=clock), draft_pool(1.0, clock=clock)
    router = TinyRouter(target, draft)
    num_rounds = 5
    request = Submit("r", (1, 2, 3), sampling(1 + num_rounds * (draft_len + 1), ignore_eos=True), draft_len)
    router.submit(request)
    router.run(clock.tick)
    assert target.output("r") == plain_output(request)
    assert [len(commit.token_ids) for commit in target.of(Commit)] == [1] + num_rounds * [draft_len + 1]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    draft_len=st.integers(1, 8),
    agreement=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    hold=st.sampled_from(HoldMode),
    mode=st.sampled_from(DraftLengthMode),
    num_blocks=st.sampled_from([22, 30, 200]),
    prefix_cache=st.booleans(),
)
def test_output_survives_any_fault_of_the_draft_stream(
    seed: int,
    draft_len: int,
    agreement: float,
    hold: HoldMode,
    mode: DraftLengthMode,
    num_blocks: int,
    prefix_cache: bool,
) -> None:
    clock = ManualClock()
    target = target_pool(num_blocks, hold, mode, clock, max_hold_s=0.05, prefix_cache=prefix_cache)
    draft = draft_pool(agreement, num_blocks, clock=clock, max_sessions=3, prefix_cache=prefix_cache)
    router = TinyRouter(target, draft, unreliable(seed))
    requests = submissions(5, draft_len, seed)
    for request in requests:
        router.submit(request)
    router.run(clock.tick)
    router.close()
    assert [target.output(request.request_id) for request in requests] == [plain_output(r) for r in requests]
    assert target.is_free()
    assert draft.is_free()
    assert target.engine.faults.total == draft.engine.faults.total == 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), moment=st.integers(0, 40), victim=st.integers(0, 3))
def test_an_abort_at_any_moment_ends_its_request_and_no_other(seed: int, moment: int, victim: int) -> None:
    clock = ManualClock()
    target, draft = target_pool(40, clock=clock), draft_pool(0.7, 40, clock=clock)
    router = TinyRouter(target, draft)
    requests = submissions(4, 4, seed)
    for request in requests:
        router.submit(request)
    request_id = f"r{victim}"

    def advance() -> None:
        clock.tick()
        if clock.now == pytest.approx(0.01 * (moment + 1)):
            target.engine.handle([Abort(request_id), Abort(request_id)])

    router.run(advance)
    router.close()
    for request in requests:
        expected = plain_output(request)
        output = target.output(request.request_id)
        assert output == (expected[: len(output)] if request.request_id == request_id else expected)
    last = [commit for commit in target.of(Commit) if commit.finish_reason is not None]
    assert sorted(commit.request_id for commit in last) == sorted(request.request_id for request in requests)
    assert target.is_free()
    assert draft.is_free()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), failing=st.sets(st.integers(0, 30), max_size=4), in_draft=st.booleans())
def test_a_failing_step_ends_only_its_own_batch(seed: int, failing: set[int], in_draft: bool) -> None:
    clock = ManualClock()
    target, draft = target_pool(clock=clock, max_num_seqs=2), draft_pool(0.7, clock=clock)
    victims: set[str] = set()
    runner = (draft if in_draft else target).runner

    def fail(step: Any) -> None:
        if len(runner.steps) in failing:
            victims.update(item.request_id for item in step.scheduled)
            raise RuntimeError("the device fell over")

    runner.before_step = fail
    router = TinyRouter(target, draft)
    requests = submissions(4, 4, seed)
    for request in requests:
        router.submit(request)
    router.run(clock.tick)
    router.close()
    refused = {refusal.request_id for refusal in target.of(Refusal)}
    assert refused == (set() if in_draft else victims)
    for request in requests:
        if request.request_id not in refused:
            assert target.output(request.request_id) == plain_output(request)
    assert target.is_free()
    assert draft.is_free()


def test_a_commit_after_finish_never_comes() -> None:
    clock = ManualClock()
    target, draft = target_pool(clock=clock), draft_pool(clock=clock)
    router = TinyRouter(target, draft)
    router.submit(Submit("r", (1, 2), sampling(3, ignore_eos=True), 4))
    router.run(clock.tick)
    target.engine.handle([DraftBlock("r", 5, (1,)), Abort("r")])
    target.engine.step()
    assert target.of(Commit)[-1].finish_reason is FinishReason.LENGTH
