"""The scheduler against a toy model: whatever happens to guesses, every sequence gets the model's own output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.core.block_pool import BlockPool
from cluster.core.draft_length import DraftLengthConfig, DraftLengthController
from cluster.core.kv_cache import KVCacheManager
from cluster.core.scheduler import Scheduler, SchedulerConfig
from cluster.core.step import SchedulerOutput
from cluster.messages.answer import FinishReason
from cluster.messages.request import DraftLengthMode, HoldMode, SamplingParams
from cluster.messages.rounds import Commit, DraftBlock, SetDraftLimit, Submit
from tests.fakes import ToyModel, ToyRunner

pytestmark = pytest.mark.property

VOCAB_SIZE = 24
EOS = 0
MAX_MODEL_LEN = 40
MAX_HOLD_S = 0.5
MODEL = ToyModel(vocab_size=VOCAB_SIZE)

tokens = st.integers(0, VOCAB_SIZE - 1)
shapes = st.tuples(st.integers(1, 16), st.integers(4, 30), st.integers(-1, 1))  # prompt_len, max_tokens, priority


@dataclass
class Client:
    """What the client of one request has sent and has been told."""

    submit: Submit
    deadline: float | None
    output: list[int]
    max_draft_tokens: int
    blocks: list[DraftBlock] = field(default_factory=list)

    @property
    def committed(self) -> tuple[int, ...]:
        return self.submit.prompt_token_ids + tuple(self.output)

    def truth(self) -> tuple[tuple[int, ...], FinishReason]:
        """The plain output: the model's continuation, up to the first reason to stop."""
        prompt, sampling = self.submit.prompt_token_ids, self.submit.sampling
        room = min(sampling.max_tokens, MAX_MODEL_LEN - len(prompt))
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
        output = MODEL.continuation(prompt, sampling, room)
        for index, token_id in enumerate(output, start=1):
            if token_id in stops and index > len(self.submit.output_token_ids):
                return output[:index], FinishReason.STOP
        return output, FinishReason.LENGTH


class SchedulerMachine(RuleBasedStateMachine):
    """Submits, guesses of every kind, aborts, deadlines and steps in any order, over a small KV pool."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_submitted = 0
        self.clients: dict[str, Client] = {}

    @initialize(
        block_size=st.integers(1, 5),
        num_slots=st.integers(20, 80),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 16),
        hold=st.sampled_from(HoldMode),
        mode=st.sampled_from(DraftLengthMode),
        prefix_cache=st.booleans(),
    )
    def start(
        self,
        block_size: int,
        num_slots: int,
        max_num_seqs: int,
        budget: int,
        hold: HoldMode,
        mode: DraftLengthMode,
        prefix_cache: bool,
    ) -> None:
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            max_queued=6,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS}),
            hold=hold,
            max_hold_s=MAX_HOLD_S,
        )
        self.kv = KVCacheManager(BlockPool(num_slots // block_size), block_size, prefix_cache)
        controller = DraftLengthController(DraftLengthConfig(mode=mode, probe_interval=4))
        self.scheduler = Scheduler(self.config, self.kv, controller)
        self.runner = ToyRunner(block_size, MODEL)
        self.runner.may_write = lambda block_id: block_id not in self.kv.pool.cache

    # --- commands ---

    @rule(
        prompt=st.lists(tokens, min_size=1, max_size=20),
        max_tokens=st.integers(1, 30),
        stop=st.sets(tokens, max_size=1),
        ignore_eos=st.booleans(),
        seed=st.integers(0, 3),
        max_draft_tokens=st.sampled_from([0, 1, 3, 8, 8]),
        priority=st.integers(-1, 1),
        deadline_s=st.sampled_from([None, None, None, 0.1, 3.0]),
        num_resumed=st.sampled_from([0, 0, 2]),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        stop: set[int],
        ignore_eos: bool,
        seed: int,
        max_draft_tokens: int,
        priority: int,
        deadline_s: float | None,
        num_resumed: int,
    ) -> None:
        sampling = SamplingParams(max_tokens, seed, stop_token_ids=tuple(stop), ignore_eos=ignore_eos)
        resumed = MODEL.continuation(prompt, sampling, num_resumed)
        self.send(Submit("", tuple(prompt), sampling, max_draft_tokens, resumed, priority, deadline_s))

    @rule(
        shapes=st.lists(st.tuples(st.integers(1, 16), st.integers(4, 30), st.integers(-1, 1)), min_size=2, max_size=6)
    )
    def submit_a_burst(self, shapes: list[tuple[int, int, int]]) -> None:
        for prompt_len, max_tokens, priority in shapes:
            prompt = tuple(range(prompt_len))
            sampling = SamplingParams(max_tokens, seed=self.num_submitted, ignore_eos=True)
            tenant = f"tenant-{self.num_submitted % 3}"
            self.send(Submit("", prompt, sampling, max_draft_tokens=4, priority=priority, tenant=tenant))

    def send(self, submit: Submit) -> None:
        submit = replace(submit, request_id=f"request-{self.num_submitted}")
        self.num_submitted += 1
        if self.scheduler.submit(submit, self.now) is None:
            deadline = None if submit.deadline_s is None else self.now + submit.deadline_s
            output = list(submit.output_token_ids)
            self.clients[submit.request_id] = Client(submit, deadline, output, submit.max_draft_tokens)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), num_right=st.integers(0, 8), num_wrong=st.integers(0, 3), age=st.integers(-2, 4))
    def propose(self, data: st.DataObject, num_right: int, num_wrong: int, age: int) -> None:
        """Guesses on what was committed `age` tokens ago (or on more than is committed), right ones first."""
        client = self.pick(data)
        prefix = client.committed[: max(1, len(client.committed) - age)]
        right = MODEL.continuation(prefix, client.submit.sampling, num_right)
        wrong = tuple(data.draw(tokens) for _ in range(num_wrong))
        block = DraftBlock(client.submit.request_id, len(client.committed) - age, right + wrong, draft_time_s=0.01)
        client.blocks.append(block)
        self.scheduler.propose(block, self.now)

    @precondition(lambda self: any(client.blocks for client in self.clients.values()))
    @rule(data=st.data())
    def propose_an_earlier_block_again(self, data: st.DataObject) -> None:
        blocks = [block for client in self.clients.values() for block in client.blocks]
        self.scheduler.propose(data.draw(st.sampled_from(blocks)), self.now)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), bad=st.sampled_from([(-1,), (VOCAB_SIZE,), (1,) * 33]))
    def propose_rubbish(self, data: st.DataObject, bad: tuple[int, ...]) -> None:
        client = self.pick(data)
        self.scheduler.propose(DraftBlock(client.submit.request_id, len(client.committed), bad), self.now)
        self.scheduler.propose(DraftBlock(client.submit.request_id, -3, (1, 2, 3)), self.now)
        self.scheduler.propose(DraftBlock("nobody", 3, (1,)), self.now)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def say_that_no_guess_will_come(self, data: st.DataObject) -> None:
        client = self.pick(data)
        self.scheduler.propose(DraftBlock(client.submit.request_id, len(client.committed), ()), self.now)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), max_draft_tokens=st.sampled_from([0, 0, 1, 4, 8, 32]))
    def set_draft_limit(self, data: st.DataObject, max_draft_tokens: int) -> None:
        client = self.pick(data)
        client.max_draft_tokens = max_draft_tokens
        self.scheduler.set_draft_limit(SetDraftLimit(client.submit.request_id, max_draft_tokens))
        self.scheduler.set_draft_limit(SetDraftLimit("nobody", max_draft_tokens))

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.abort_now(self.pick(data).submit.request_id)

    @rule(seconds=st.floats(0.001, 1.0))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds

    # --- steps ---

    @rule()
    def step(self) -> None:
        self.run(self.schedule())

    @precondition(lambda self: self.clients)
    @rule(num_steps=st.integers(1, 30), num_right=st.sampled_from([0, 1, 3, 8]), delay_s=st.sampled_from([0.0, 0.03]))
    def step_with_a_drafter(self, num_steps: int, num_right: int, delay_s: float) -> None:
        """A drafter answers every commit, in time or a step late; with nothing when it knows nothing."""
        for _ in range(num_steps):
            asked = self.run(self.schedule())
            late = self.schedule() if delay_s else SchedulerOutput()
            for commit in asked:
                self.answer(commit, num_right, delay_s)
            self.run(late)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def step_with_an_abort_under_way(self, data: st.DataObject) -> None:
        scheduled = self.schedule()
        if self.clients:
            self.abort_now(self.pick(data).submit.request_id)
        self.run(scheduled)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def step_with_guesses_coming_under_way(self, data: st.DataObject) -> None:
        scheduled = self.schedule()
        if self.clients:
            self.propose(data, data.draw(st.integers(1, 8)), 0, 0)
        self.run(scheduled)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), max_draft_tokens=st.sampled_from([0, 4]))
    def step_with_a_draft_limit_coming_under_way(self, data: st.DataObject, max_draft_tokens: int) -> None:
        scheduled = self.schedule()
        if self.clients:
            self.set_draft_limit(data, max_draft_tokens)
        self.run(scheduled)

    @rule()
    def step_that_fails(self) -> None:
        """The engine aborts what was in the step; the others go on."""
        for item in self.schedule().scheduled:
            self.abort_now(item.request_id)

    # --- what must hold ---

    @invariant()
    def the_books_agree(self) -> None:
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert stats.num_running + stats.num_waiting == len(self.clients) == self.scheduler.num_unfinished
        assert stats.num_running <= self.config.max_num_seqs

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        work = sum(len(client.submit.prompt_token_ids) + 30 for client in self.clients.values())
        for _ in range(work * (len(self.clients) + 1)):
            scheduled = self.schedule()
            if not self.clients:
                break
            assert scheduled.scheduled or scheduled.wake_at is not None, "nothing runs and nothing will wake it"
            self.run(scheduled)
            if not scheduled.scheduled:
                assert scheduled.wake_at is not None
                self.now = scheduled.wake_at
        assert not self.clients, "no end within the bound"
        assert self.kv.pool.num_free == self.kv.pool.num_blocks
        self.the_books_agree()
        stats = self.scheduler.stats().prefix_cache
        assert 0 <= stats.num_hit_tokens <= stats.num_query_tokens

    def pick(self, data: st.DataObject) -> Client:
        return self.clients[data.draw(st.sampled_from(sorted(self.clients)))]

    def abort_now(self, request_id: str) -> None:
        commit = self.scheduler.abort(request_id)
        assert (commit is None) == (request_id not in self.clients)
        if commit is not None:
            self.take(commit, lambda reason: reason is FinishReason.CANCELLED)
        assert self.scheduler.abort(request_id) is None
        assert self.kv.block_table(request_id) == ()

    def schedule(self) -> SchedulerOutput:
        for commit in self.scheduler.expire(self.now):
            self.take(commit, lambda reason: reason is FinishReason.DEADLINE)
        deadlines = [client.deadline for client in self.clients.values() if client.deadline is not None]
        assert all(deadline > self.now for deadline in deadlines)
        output = self.scheduler.schedule(self.now)
        self.check_limits(output)
        return output

    def check_limits(self, output: SchedulerOutput) -> None:
        assert output.num_scheduled_tokens <= self.config.max_num_batched_tokens
        assert len(output.scheduled) <= self.config.max_num_seqs
        assert output.wake_at is None or self.now < output.wake_at <= self.now + MAX_HOLD_S
        for item in output.scheduled:
            client = self.clients[item.request_id]
            end = item.start + len(item.token_ids) - item.num_draft_tokens
            assert item.token_ids[: end - item.start] == client.committed[item.start : end]
            assert all(0 <= token_id < VOCAB_SIZE for token_id in item.token_ids)
            assert item.num_draft_tokens <= client.max_draft_tokens
            assert len(client.output) + item.num_draft_tokens < client.submit.sampling.max_tokens
            assert end + item.num_draft_tokens < MAX_MODEL_LEN
            assert item.num_samples == (item.num_draft_tokens + 1 if end == len(client.committed) else 0)

    def answer(self, commit: Commit, num_right: int, delay_s: float) -> None:
        """Guess as many as were asked for, the first `num_right` of them right."""
        client = self.clients.get(commit.request_id)
        if client is None or commit.next_draft_len == 0:
            return
        right = MODEL.continuation(client.committed, client.submit.sampling, min(num_right, commit.next_draft_len))
        wrong = (1,) * (commit.next_draft_len - len(right)) if num_right else ()
        block = DraftBlock(commit.request_id, len(client.committed), right + wrong, draft_time_s=0.001)
        self.scheduler.propose(block, self.now + delay_s)

    def run(self, output: SchedulerOutput) -> list[Commit]:
        """Execute and apply a step; its commits."""
        if not output.scheduled:
            return []
        step_output = self.runner.execute(output)
        self.now += 0.02
        finished_by_itself = {FinishReason.STOP, FinishReason.LENGTH}
        commits = self.scheduler.apply(output.scheduled, step_output, self.now, 0.02)
        for commit in commits:
            assert 1 <= len(commit.token_ids) <= commit.num_draft_tokens + 1
            assert commit.num_accepted_tokens <= min(commit.num_draft_tokens, len(commit.token_ids))
            self.take(commit, lambda reason: reason is None or reason in finished_by_itself)
        return commits

    def take(self, commit: Commit, may_end: Callable[[FinishReason | None], bool]) -> None:
        client = self.clients[commit.request_id]
        assert commit.base_len == len(client.committed)
        assert commit.num_cached_tokens == 0 or not client.output
        assert commit.num_cached_tokens < len(client.submit.prompt_token_ids)
        client.output.extend(commit.token_ids)
        output, finish_reason = client.truth()
        assert tuple(client.output) == output[: len(client.output)]
        assert may_end(commit.finish_reason)
        assert commit.next_draft_len <= max(0, client.submit.sampling.max_tokens - len(client.output) - 1)
        assert commit.next_draft_len <= client.max_draft_tokens
        if commit.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (tuple(client.output), commit.finish_reason) == (output, finish_reason)
        elif commit.finish_reason is None:
            assert tuple(client.output) != output
            num_kept = len(self.kv.block_table(commit.request_id))
            assert num_kept == self.kv.num_blocks_for(len(client.committed) - 1), "rejected guesses keep no blocks"
        if commit.finish_reason is not None:
            del self.clients[commit.request_id]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
