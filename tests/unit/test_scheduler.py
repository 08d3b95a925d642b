"""What the scheduler runs and commits, case by case, against a toy model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.core.block_pool import BlockPool
from cluster.core.draft_length import DraftLengthConfig, DraftLengthController
from cluster.core.kv_cache import KVCacheManager
from cluster.core.scheduler import Scheduler, SchedulerConfig
from cluster.core.step import SampledTokens, SchedulerOutput, StepOutput
from cluster.messages.answer import FinishReason, TokenLogprobs
from cluster.messages.request import DraftLengthMode, HoldMode
from cluster.messages.rounds import Commit, DraftBlock, RefusalReason, StepTimings, Submit
from tests.fakes import ToyModel, ToyRunner, sampling

pytestmark = pytest.mark.unit

MODEL = ToyModel()
EOS = 49
STEP_S = 0.02
CONFIG = SchedulerConfig(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=64,
    max_queued=1,
    vocab_size=50,
    eos_token_ids=frozenset({EOS}),
    hold=HoldMode.NEVER,
    max_hold_s=0.5,
)
PROMPT = (3, 1, 4, 1, 5)


class Target:
    """A scheduler with its runner and clock."""

    def __init__(self, config: SchedulerConfig = CONFIG, num_blocks: int = 64, block_size: int = 4) -> None:
        self.now = 0.0
        self.kv = KVCacheManager(BlockPool(num_blocks), block_size)
        controller = DraftLengthController(DraftLengthConfig(DraftLengthMode.FIXED))
        self.scheduler = Scheduler(config, self.kv, controller)
        self.runner = ToyRunner(block_size, MODEL)

    def submit(self, request_id: str = "a", prompt: tuple[int, ...] = PROMPT, **fields: object) -> Submit:
        submit = replace(Submit(request_id, prompt, sampling(ignore_eos=True), max_draft_tokens=4), **fields)
        assert self.scheduler.submit(submit, self.now) is None
        return submit

    def schedule(self) -> SchedulerOutput:
        return self.scheduler.schedule(self.now)

    def finish(self, output: SchedulerOutput) -> list[Commit]:
        result = self.runner.execute(output)
        self.now += STEP_S
        commits = self.scheduler.apply(output.scheduled, result, self.now, STEP_S)
        self.scheduler.check_integrity()
        return commits

    def step(self) -> list[Commit]:
        return self.finish(self.schedule())

    def propose(self, submit: Submit, num_right: int, *wrong: int, since: int = 0) -> None:
        """Guesses after the prompt and `since` output tokens."""
        prefix = submit.prompt_token_ids + truth(submit, since)
        right = MODEL.continuation(prefix, submit.sampling, num_right)
        self.scheduler.propose(DraftBlock(submit.request_id, len(prefix), right + wrong), self.now)


def truth(submit: Submit, num_tokens: int) -> tuple[int, ...]:
    return MODEL.continuation(submit.prompt_token_ids, submit.sampling, num_tokens)


def wrong_token(submit: Submit, index: int) -> int:
    return (truth(submit, index + 1)[-1] + 1) % 50


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("submit", "reason", "message"),
    [
        (Submit("a", (), sampling()), RefusalReason.UNSUPPORTED, "no tokens"),
        (Submit("a", (50,), sampling()), RefusalReason.UNSUPPORTED, "in [0, 50)"),
        (Submit("a", (1,), sampling(), output_token_ids=(-1,)), RefusalReason.UNSUPPORTED, "in [0, 50)"),
        (Submit("a", (1,) * 64, sampling()), RefusalReason.TOO_LONG, "64 tokens leave no room"),
        (Submit("a", (1,), sampling(2), output_token_ids=(1, 2)), RefusalReason.UNSUPPORTED, "nothing to generate"),
        (Submit("a", (1,) * 20, sampling(30)), RefusalReason.TOO_LONG, "50 tokens need 13 KV blocks, the pool has 8"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_reason(
    submit: Submit, reason: RefusalReason, message: str
) -> None:
    target = Target(num_blocks=8)
    refusal = target.scheduler.submit(submit, 0.0)
    assert refusal is not None
    assert (refusal.request_id, refusal.reason) == ("a", reason)
    assert message in refusal.message
    assert target.scheduler.num_unfinished == 0


def test_a_request_id_in_use_is_refused_and_the_first_request_goes_on() -> None:
    target = Target()
    submit = target.submit()
    refusal = target.scheduler.submit(submit, 0.0)
    assert refusal is not None
    assert refusal.reason is RefusalReason.INTERNAL
    assert target.step()[0].token_ids == truth(submit, 1)


def test_the_queue_is_bounded() -> None:
    target = Target(replace(CONFIG, max_num_seqs=1, max_queued=1))
    target.submit("a")
    target.submit("b")
    refusal = target.scheduler.submit(Submit("c", PROMPT, sampling()), 0.0)
    assert refusal is not None
    assert refusal.reason is RefusalReason.QUEUE_FULL


# --- the budget ------------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_and_only_the_last_one_samples() -> None:
    target = Target()
    target.submit(prompt=(7,) * 20)
    first = target.schedule()
    assert [(len(item.token_ids), item.num_samples) for item in first.scheduled] == [(16, 0)]
    assert target.finish(first) == []
    second = target.schedule()
    assert [(item.start, len(item.token_ids), item.num_samples) for item in second.scheduled] == [(16, 4, 1)]
    assert len(target.finish(second)) == 1


def test_decode_rows_come_before_prefill_chunks() -> None:
    target = Target()
    target.submit("a")
    target.step()
    target.step()
    target.submit("b", prompt=(7,) * 20)
    assert [(item.request_id, len(item.token_ids)) for item in target.schedule().scheduled] == [("a", 1), ("b", 8)]


def test_streams_run_once_by_themselves_before_they_share_a_step_with_a_prompt() -> None:
    target = Target()
    target.submit("a")
    target.step()
    target.submit("b", prompt=(7,) * 20)
    assert [commit.request_id for commit in target.step()] == ["a"]
    assert [item.request_id for item in target.schedule().scheduled] == ["a", "b"]


def test_guesses_leave_half_of_the_budget_to_prefill() -> None:
    target = Target(replace(CONFIG, max_num_batched_tokens=7))
    submit = target.submit("a")
    target.step()
    target.step()
    target.propose(submit, 4, since=2)
    target.submit("b", prompt=(7,) * 20)
    assert [(item.num_draft_tokens, len(item.token_ids)) for item in target.schedule().scheduled] == [(3, 4), (0, 3)]


def test_guesses_share_a_short_budget_equally() -> None:
    target = Target(replace(CONFIG, max_num_batched_tokens=12))
    submits = [target.submit(name) for name in "abcd"]
    for _ in range(3):
        target.step()
    for submit in submits:
        target.propose(submit, 5)
        target.propose(submit, 4, since=1)
        target.propose(submit, 4, since=2)
    assert [item.num_draft_tokens for item in target.schedule().scheduled] == [2, 2, 2, 2]


def test_there_are_never_more_running_sequences_than_rows() -> None:
    target = Target(replace(CONFIG, max_num_batched_tokens=2))
    for name in "abc":
        target.submit(name)
    for _ in range(8):
        target.step()
    assert target.scheduler.stats().num_running == 2
    assert len(target.schedule().scheduled) == 2


def test_priority_goes_before_arrival() -> None:
    target = Target(replace(CONFIG, max_num_seqs=1, max_queued=3))
    target.submit("late", priority=1)
    target.submit("first")
    target.submit("second")
    assert target.step()[0].request_id == "first"


# --- verification ----------------------------------------------------------------------------------------------------


def test_right_guesses_are_committed_with_the_targets_own_next_token() -> None:
    target = Target()
    submit = target.submit()
    assert target.step() == [
        Commit("a", 5, truth(submit, 1), next_draft_len=4, longest_draft_len=4, timings=StepTimings(step_s=STEP_S)),
    ]
    target.propose(submit, 4, since=1)
    (commit,) = target.step()
    assert commit.token_ids == truth(submit, 6)[1:]
    assert (commit.base_len, commit.num_draft_tokens, commit.num_accepted_tokens) == (6, 4, 4)


def test_the_first_wrong_guess_is_replaced_by_the_targets_token_and_the_rest_dropped() -> None:
    target = Target()
    submit = target.submit()
    target.step()
    target.propose(submit, 1, wrong_token(submit, 2), 5, since=1)
    (commit,) = target.step()
    assert commit.token_ids == truth(submit, 3)[1:]
    assert (commit.num_draft_tokens, commit.num_accepted_tokens) == (3, 1)
    assert target.kv.block_table("a") == tuple(range(target.kv.num_blocks_for(7)))
    assert target.step()[0].token_ids == truth(submit, 4)[3:]


def test_guesses_made_before_the_first_token_stay_valid_if_it_is_the_one_guessed() -> None:
    target = Target()
    submit = target.submit()
    target.propose(submit, 3)
    assert target.step()[0].token_ids == truth(submit, 1)
    (commit,) = target.step()
    assert (commit.num_draft_tokens, commit.token_ids) == (2, truth(submit, 4)[1:])


def test_the_tail_of_a_block_stays_valid_when_its_head_has_been_committed_plainly() -> None:
    target = Target()
    submit = target.submit()
    target.step()
    target.step()
    target.propose(submit, 4, since=1)
    assert target.step()[0].num_accepted_tokens == 3
    assert target.scheduler.stats().num_stale_blocks == 0


def test_guesses_that_other_tokens_have_overtaken_are_dropped_and_counted() -> None:
    target = Target()
    submit = target.submit()
    target.step()
    target.step()
    target.propose(submit, 0, wrong_token(submit, 1), 4, 4, since=1)
    target.propose(submit, 1, since=1)
    assert target.step()[0].num_draft_tokens == 0
    assert target.scheduler.stats().num_stale_blocks == 2


@pytest.mark.parametrize(
    "block",
    [
        DraftBlock("a", 6, (50,)),
        DraftBlock("a", 6, (-1,)),
        DraftBlock("a", 6, (1,) * 33),
        DraftBlock("a", 0, (3, 1, 4, 1, 5, 1, 1)),
        DraftBlock("a", 7, (1,)),
    ],
)
def test_a_malformed_block_is_dropped_and_counted(block: DraftBlock) -> None:
    target = Target()
    target.submit()
    target.step()
    target.scheduler.propose(block, target.now)
    assert target.schedule().scheduled[0].num_draft_tokens == 0
    assert target.scheduler.stats().num_stale_blocks == 1


def test_a_request_without_speculation_takes_no_guesses_and_asks_for_none() -> None:
    target = Target()
    submit = target.submit(max_draft_tokens=0)
    assert target.step()[0].next_draft_len == 0
    target.propose(submit, 3, since=1)
    assert target.schedule().scheduled[0].num_draft_tokens == 0


def test_a_block_on_fewer_tokens_does_not_replace_one_on_more() -> None:
    target = Target()
    submit = target.submit()
    target.step()
    target.step()
    target.propose(submit, 4, since=2)
    target.propose(submit, 2, since=1)
    assert target.schedule().scheduled[0].num_draft_tokens == 4


def test_guesses_that_come_while_a_step_runs_are_checked_against_what_it_commits() -> None:
    target = Target()
    submit = target.submit()
    target.step()
    under_way = target.schedule()
    target.propose(submit, 4, since=1)
    target.finish(under_way)
    assert target.schedule().scheduled[0].token_ids == truth(submit, 5)[1:]


def test_guesses_that_a_step_under_way_contradicts_are_dropped_and_counted() -> None:
    target = Target()
    submit = target.submit()
    target.step()
    under_way = target.schedule()
    target.propose(submit, 0, wrong_token(submit, 1), 4, since=1)
    target.finish(under_way)
    assert target.schedule().scheduled[0].num_draft_tokens == 0
    assert target.scheduler.stats().num_stale_blocks == 1


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a_stop_token_inside_the_accepted_guesses_ends_the_sequence_there() -> None:
    target = Target()
    plain = Submit("a", PROMPT, sampling())
    stop = truth(plain, 3)[2]
    submit = target.submit(sampling=sampling(stop_token_ids=(stop,), ignore_eos=True))
    target.step()
    target.propose(submit, 4, since=1)
    (commit,) = target.step()
    assert commit.token_ids == truth(submit, 3)[1:]
    assert (commit.finish_reason, commit.next_draft_len) == (FinishReason.STOP, 0)
    assert commit.num_accepted_tokens == 2
    assert target.kv.pool.num_used == 0


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_ends_a_sequence_unless_it_is_ignored(ignore_eos: bool) -> None:
    target = Target(replace(CONFIG, eos_token_ids=frozenset({truth(Submit("a", PROMPT, sampling()), 1)[0]})))
    target.submit(sampling=sampling(ignore_eos=ignore_eos))
    assert target.step()[0].finish_reason is (None if ignore_eos else FinishReason.STOP)


def test_max_tokens_ends_a_sequence_and_bounds_the_guesses() -> None:
    target = Target()
    submit = target.submit(sampling=sampling(4, ignore_eos=True))
    assert target.step()[0].next_draft_len == 2
    target.propose(submit, 4, since=1)
    (commit,) = target.step()
    assert (commit.num_draft_tokens, commit.finish_reason) == (2, FinishReason.LENGTH)
    assert commit.token_ids == truth(submit, 4)[1:]


def test_the_context_length_ends_a_sequence() -> None:
    target = Target(replace(CONFIG, max_model_len=8))
    submit = target.submit()
    target.step()
    target.propose(submit, 4, since=1)
    (commit,) = target.step()
    assert (commit.token_ids, commit.finish_reason) == (truth(submit, 3)[1:], FinishReason.LENGTH)


def test_tokens_committed_elsewhere_count_against_max_tokens() -> None:
    target = Target()
    plain = Submit("a", PROMPT, sampling(3, ignore_eos=True))
    target.submit(sampling=plain.sampling, output_token_ids=truth(plain, 2))
    (commit,) = target.step()
    assert (commit.base_len, commit.token_ids) == (7, truth(plain, 3)[2:])
    assert commit.finish_reason is FinishReason.LENGTH


def test_logprobs_are_cut_with_the_tokens() -> None:
    target = Target()
    submit = target.submit(sampling=sampling(1, ignore_eos=True))
    output = target.schedule()
    token_ids = truth(submit, 1)
    sampled = SampledTokens(token_ids, (TokenLogprobs(token_ids[0], -0.5),))
    (commit,) = target.scheduler.apply(output.scheduled, StepOutput({"a": sampled}), 0.1, 0.1)
    assert commit.logprobs == (TokenLogprobs(token_ids[0], -0.5),)


def test_an_aborted_sequence_frees_its_kv_and_says_how_far_it_got() -> None:
    target = Target()
    target.submit()
    target.step()
    assert target.scheduler.abort("a") == Commit("a", 6, (), finish_reason=FinishReason.CANCELLED)
    assert target.scheduler.abort("a") is None
    assert target.kv.pool.num_used == 0


def test_a_step_does_not_touch_a_request_that_was_aborted_and_sent_again_meanwhile() -> None:
    target = Target()
    target.submit()
    under_way = target.schedule()
    target.scheduler.abort("a")
    submit = target.submit()
    assert target.finish(under_way) == []
    assert target.step()[0].token_ids == truth(submit, 1)


def test_a_passed_deadline_ends_running_and_waiting_sequences() -> None:
    target = Target(replace(CONFIG, max_num_seqs=1))
    target.submit("a", deadline_s=1.0)
    target.submit("b", deadline_s=0.5)
    target.step()
    assert target.scheduler.expire(0.4) == []
    assert target.scheduler.expire(0.5) == [Commit("b", 5, (), finish_reason=FinishReason.DEADLINE)]
    assert target.scheduler.expire(2.0) == [Commit("a", 6, (), finish_reason=FinishReason.DEADLINE)]
    assert target.scheduler.num_unfinished == target.kv.pool.num_used == 0


def test_the_deadline_of_an_ended_request_does_not_end_a_later_one_of_the_same_id() -> None:
    target = Target()
    target.submit(deadline_s=1.0)
    target.scheduler.abort("a")
    target.submit()
    assert target.scheduler.expire(2.0) == []
    assert target.scheduler.num_unfinished == 1


def test_an_output_without_a_sequences_samples_is_an_error() -> None:
    target = Target()
    target.submit()
    with pytest.raises(ValueError, match="sampled nothing for a"):
        target.scheduler.apply(target.schedule().scheduled, StepOutput({}), 0.1, 0.1)


def test_the_first_commit_tells_the_time_in_the_queue() -> None:
    target = Target()
    target.submit()
    target.now = 3.0
    assert target.step()[0].timings.queue_s == 3.0
    assert target.step()[0].timings.queue_s == 0.0


# --- short of KV -----------------------------------------------------------------------------------------------------


def test_guesses_are_given_up_before_anyone_is_preempted() -> None:
    target = Target(num_blocks=4, block_size=2)
    submit = target.submit(sampling=sampling(4, ignore_eos=True))
    target.step()
    assert target.kv.allocate_slots("someone else", 2)
    target.propose(submit, 2, since=1)
    assert target.schedule().scheduled[0].num_draft_tokens == 0
    assert target.scheduler.stats().num_preemptions == 0


def test_the_latest_of_the_lowest_priority_is_preempted_and_loses_no_output() -> None:
    target = Target(num_blocks=8, block_size=2)
    submits = {name: target.submit(name, sampling=sampling(9, ignore_eos=True)) for name in "ab"}
    outputs: dict[str, tuple[int, ...]] = {"a": (), "b": ()}
    finished = []
    for _ in range(40):
        for commit in target.step():
            outputs[commit.request_id] += commit.token_ids
            if commit.finish_reason is not None:
                finished.append(commit.request_id)
    assert target.scheduler.stats().num_preemptions == 1
    assert finished == ["a", "b"]
    assert outputs == {name: truth(submit, 9) for name, submit in submits.items()}
    assert target.scheduler.stats().num_used_blocks == 0
    assert target.scheduler.stats().peak_used_blocks <= 8


def test_a_newcomer_waits_until_its_whole_prompt_fits_beside_the_running() -> None:
    target = Target(num_blocks=6, block_size=4)
    target.submit("a", prompt=(1,) * 9, sampling=sampling(4, ignore_eos=True))
    target.step()
    target.submit("b", prompt=(1,) * 12, sampling=sampling(4, ignore_eos=True))
    target.step()
    assert target.scheduler.stats().num_waiting == 1
    while not any(commit.finish_reason for commit in target.step()):
        assert target.scheduler.stats().num_waiting == 1
    assert target.step()[0].request_id == "b"


def test_of_equal_priority_the_tenant_that_has_had_most_gives_way() -> None:
    target = Target(replace(CONFIG, max_queued=3), num_blocks=8, block_size=2)
    long = sampling(8, ignore_eos=True)
    target.submit("loud", tenant="loud", sampling=long)
    for _ in range(3):
        target.step()
    target.submit("quiet", tenant="quiet", prompt=(1, 2), sampling=long)
    while not target.scheduler.stats().num_preemptions:
        target.step()
    assert {item.request_id for item in target.schedule().scheduled} == {"loud"}, "it came first of all: it is safe"

    target = Target(replace(CONFIG, max_queued=3), num_blocks=10, block_size=2)
    target.submit("first", tenant="third", prompt=(1,), sampling=long)
    target.submit("loud", tenant="loud", sampling=long)
    target.step()
    target.submit("quiet", tenant="quiet", prompt=(1, 2), sampling=long)
    while not target.scheduler.stats().num_preemptions:
        target.step()
    assert {item.request_id for item in target.schedule().scheduled} == {"first", "quiet"}


@pytest.mark.parametrize(("num_steps", "first"), [(1, "talk again"), (9, "read again")])
def test_a_tenant_pays_for_its_prompts_and_for_its_output(num_steps: int, first: str) -> None:
    target = Target(replace(CONFIG, max_num_seqs=2, max_queued=4))
    target.submit("talk", tenant="talker", prompt=(1, 2), sampling=sampling(20, ignore_eos=True))
    for _ in range(num_steps):
        target.step()
    target.submit("read", tenant="reader", prompt=(1,) * 6, sampling=sampling(20, ignore_eos=True))
    for _ in range(2):
        target.step()
    for name in ("read again", "talk again") if first == "talk again" else ("talk again", "read again"):
        target.submit(name, tenant=f"{name[:4]}er")
    target.scheduler.abort("read")
    assert first in {item.request_id for item in target.schedule().scheduled}


def test_a_short_prompt_of_a_quiet_tenant_overtakes_the_giant_one_of_a_loud_tenant() -> None:
    target = Target()
    target.submit("giant", tenant="loud", prompt=(7,) * 60, sampling=sampling(2))
    target.step()
    target.submit("short", tenant="quiet")
    first, second = target.schedule().scheduled
    assert (first.request_id, first.num_samples, len(first.token_ids)) == ("short", 1, 5)
    assert (second.request_id, second.start) == ("giant", 16)
