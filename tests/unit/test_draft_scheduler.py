import pytest

from cluster.core.block_pool import BlockPool
from cluster.core.draft_scheduler import DraftScheduler, DraftSchedulerConfig
from cluster.core.kv_cache import KVCacheManager
from cluster.core.step import SchedulerOutput
from cluster.messages.rounds import Close, Committed, DraftBlock, Open, Refusal, RefusalReason
from tests.engines import BLOCK_SIZE
from tests.fakes import ToyModel, ToyRunner, sampling

pytestmark = pytest.mark.unit


class Drafting:
    """A draft scheduler stepped by hand, with everything that it said."""

    def __init__(self, num_blocks=64, **limits):
        self.kv = KVCacheManager(BlockPool(num_blocks), BLOCK_SIZE)
        defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 100, "max_sessions": 8}
        config = DraftSchedulerConfig(**{**defaults, **limits}, vocab_size=50)
        self.scheduler = DraftScheduler(config, self.kv)
        self.runner = ToyRunner(BLOCK_SIZE)

    def open(self, request_id, num_tokens, draft_len=2, now=0.0, epoch=0, **fields):
        self.scheduler.handle(Open(request_id, epoch, tuple(range(num_tokens)), sampling(**fields), draft_len), now)

    def step(self, now=0.0) -> SchedulerOutput:
        step = self.scheduler.schedule(now)
        self.scheduler.apply(step, self.runner.execute(step), now, 0.0)
        return step

    def settle(self, now=0.0):
        while self.step(now).scheduled:
            pass
        return self.scheduler.take_events()


def refusal(events) -> tuple[str, RefusalReason]:
    (event,) = events
    assert isinstance(event, Refusal)
    return event.request_id, event.reason


def test_sessions_are_drafted_for_together():
    drafting = Drafting()
    drafting.open("a", 3)
    drafting.open("b", 5)
    step = drafting.step()
    assert [(item.request_id, len(item.token_ids)) for item in step.scheduled] == [("a", 3), ("b", 5)]
    assert step.num_chained == 1, "a block of 2 in one step"
    blocks = drafting.scheduler.take_events()
    assert [block.token_ids for block in blocks] == [
        ToyModel().continuation(tuple(range(length)), sampling(), 2) for length in (3, 5)
    ]


def test_a_chain_ends_with_the_first_block_that_is_complete():
    drafting = Drafting()
    drafting.open("a", 3, draft_len=2)
    drafting.open("b", 3, draft_len=5)
    assert drafting.step().num_chained == 1
    assert [block.request_id for block in drafting.scheduler.take_events()] == ["a"]
    assert drafting.step().num_chained == 2
    (block,) = drafting.scheduler.take_events()
    assert block.token_ids == ToyModel().continuation(tuple(range(3)), sampling(), 5)


@pytest.mark.parametrize("fields", [{"presence_penalty": 1.0}, {"logit_bias": ((3, 1.0),)}, {"min_tokens": 4}])
def test_guesses_that_change_what_the_next_one_depends_on_are_made_step_by_step(fields):
    drafting = Drafting()
    drafting.open("a", 3, draft_len=3)
    drafting.open("b", 3, draft_len=3, **fields)
    assert [drafting.step().num_chained for _ in range(4)] == [0, 0, 0, 0]
    assert len(drafting.scheduler.take_events()) == 2


def test_a_prompt_is_read_beside_a_chain():
    drafting = Drafting()
    drafting.open("long", 40)
    drafting.open("a", 3, draft_len=4)
    step = drafting.step()
    assert [(len(item.token_ids), item.num_samples) for item in step.scheduled] == [(3, 1), (13, 0)]
    assert step.num_chained == 3


def test_nobody_gives_way_for_a_chain():
    drafting = Drafting(num_blocks=4)
    drafting.open("a", 7, draft_len=1)
    drafting.open("b", 7, draft_len=1)
    drafting.settle()
    drafting.scheduler.handle(Committed("a", 0, 7, (1,), draft_len=3), 9.0)
    step = drafting.step(9.0)
    assert (step.num_chained, drafting.scheduler.stats().num_preemptions) == (0, 0)
    assert len(step.scheduled[0].block_table) == 2


def test_a_stop_token_ends_a_block_within_a_chain_and_what_follows_is_forgotten():
    drafting = Drafting()
    right = ToyModel().continuation((0, 1, 2), sampling(), 6)
    drafting.open("a", 3, draft_len=6, stop_token_ids=(right[2],))
    step = drafting.step()
    assert step.num_chained == 5
    assert drafting.scheduler.take_events() == [DraftBlock("a", 3, right[:3])]
    assert drafting.kv.pool.num_used == 2, "blocks for 3 + 3 tokens"
    drafting.scheduler.handle(Committed("a", 0, 3, (*right[:3], 7), draft_len=2), 1.0)
    assert drafting.step().scheduled[0].token_ids == (right[2], 7)


def test_a_chain_counts_its_rows_and_its_guesses():
    drafting = Drafting()
    drafting.open("a", 3, draft_len=4)
    drafting.open("b", 2, draft_len=4)
    step = drafting.scheduler.schedule(0.0)
    stats = drafting.scheduler.apply(step, drafting.runner.execute(step), 0.0, 0.0)
    assert (stats.num_scheduled_tokens, stats.num_emitted_tokens) == (5 + 2 * 3, 2 * 4)


def test_a_chain_that_ends_early_is_taken_up_in_the_next_step():
    drafting = Drafting()
    drafting.open("a", 3, draft_len=6)
    asked = iter([False, False, True])
    step = drafting.scheduler.schedule(0.0)
    drafting.scheduler.apply(step, drafting.runner.execute(step, lambda: next(asked)), 0.0, 0.0)
    assert drafting.scheduler.take_events() == []
    rest = drafting.step()
    assert ([len(item.token_ids) for item in rest.scheduled], rest.num_chained) == ([1], 2)
    (block,) = drafting.scheduler.take_events()
    assert block.token_ids == ToyModel().continuation((0, 1, 2), sampling(), 6)


def test_a_long_prompt_is_read_in_chunks_beside_those_that_draft():
    drafting = Drafting()
    drafting.open("long", 40, now=0.0)
    drafting.open("short", 2, now=1.0)
    steps = [{item.request_id: len(item.token_ids) for item in drafting.step().scheduled} for _ in range(2)]
    assert steps == [{"short": 2, "long": 14}, {"long": 16}]


def test_drafting_leaves_a_quarter_of_the_rows_to_prompts():
    drafting = Drafting(max_num_seqs=8, max_num_batched_tokens=16)
    for request_id in "abcd":
        drafting.open(request_id, 4)
    drafting.open("long", 40)
    rows = {item.request_id: len(item.token_ids) for item in drafting.step().scheduled}
    assert rows == {"a": 4, "b": 4, "c": 4, "long": 4}


def test_the_number_of_sessions_in_a_step_is_bounded_and_goes_round():
    drafting = Drafting(max_num_seqs=2)
    for index in range(4):
        drafting.open(f"r{index}", 2, draft_len=1, now=float(index))
    assert [[item.request_id for item in drafting.step().scheduled] for _ in range(3)] == [
        ["r0", "r1"], ["r2", "r3"], [],
    ]  # fmt: skip


def test_a_commit_that_confirms_guesses_ships_the_rest_without_a_step():
    drafting = Drafting()
    drafting.open("a", 3, draft_len=3)
    (block,) = drafting.settle()
    drafting.scheduler.handle(Committed("a", 0, 3, block.token_ids[:1], draft_len=2), 1.0)
    assert drafting.scheduler.take_events() == [DraftBlock("a", 4, block.token_ids[1:])]


def test_rolling_back_gives_trailing_blocks_back():
    drafting = Drafting()
    drafting.open("a", 4, draft_len=8)
    drafting.settle()
    assert drafting.kv.pool.num_used == 3
    drafting.scheduler.handle(Committed("a", 0, 4, (49,), draft_len=0), 1.0)
    assert drafting.kv.pool.num_used == 2


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Open("a", 0, (), sampling()), RefusalReason.UNSUPPORTED),
        (Open("a", 0, (1, 50), sampling()), RefusalReason.UNSUPPORTED),
        (Open("a", 0, (-1,), sampling()), RefusalReason.UNSUPPORTED),
        (Open("a", 0, (1,) * 101, sampling()), RefusalReason.TOO_LONG),
        (Open("a", 0, (1,) * 90, sampling()), RefusalReason.TOO_LONG),
        (Committed("a", 0, 5, (1,), 2), RefusalReason.INTERNAL),
    ],
    ids=["no tokens", "unknown token", "negative token", "beyond the model", "beyond the pool", "no session"],
)
def test_a_message_that_cannot_be_served_is_refused(message, reason):
    drafting = Drafting(num_blocks=20)
    drafting.scheduler.handle(message, 0.0)
    assert refusal(drafting.scheduler.take_events()) == ("a", reason)
    assert drafting.scheduler.is_idle


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Committed("a", 0, 9, (1,), 2), RefusalReason.INTERNAL),
        (Committed("a", 1, 3, (1,), 2), RefusalReason.INTERNAL),
        (Committed("a", 0, 3, (50,), 2), RefusalReason.INTERNAL),
        (Committed("a", 0, 3, (1,) * 98, 2), RefusalReason.TOO_LONG),
    ],
    ids=["gap", "unknown epoch", "unknown token", "beyond the model"],
)
def test_a_session_that_cannot_follow_is_closed_and_refused(message, reason):
    drafting = Drafting()
    drafting.open("a", 3)
    drafting.settle()
    drafting.scheduler.handle(message, 1.0)
    assert refusal(drafting.scheduler.take_events()) == ("a", reason)
    assert drafting.kv.pool.num_used == 0


def test_an_older_or_repeated_open_is_dropped_and_a_newer_one_replaces():
    drafting = Drafting()
    drafting.open("a", 3, epoch=1)
    drafting.open("a", 5, epoch=1)
    drafting.open("a", 5, epoch=0)
    assert drafting.scheduler.stats().num_stale_blocks == 2
    drafting.open("a", 4, epoch=2)
    assert {(block.committed_len, block.epoch) for block in drafting.settle()} == {(4, 2)}
    assert drafting.scheduler.stats().num_running == 1


def test_closing_frees_and_is_idempotent():
    drafting = Drafting()
    drafting.open("a", 9)
    for _ in range(2):
        drafting.scheduler.handle(Close("a"), 0.0)
    assert drafting.settle() == []
    assert drafting.kv.pool.num_used == 0


def test_a_new_session_takes_the_place_of_an_idle_one_only():
    drafting = Drafting(num_blocks=3)
    drafting.open("old", 8, draft_len=1, now=0.0)
    drafting.settle(now=0.0)
    drafting.open("new", 8, now=0.5)
    assert refusal(drafting.scheduler.take_events()) == ("new", RefusalReason.QUEUE_FULL)
    drafting.open("new", 8, now=1.0)
    assert refusal(drafting.scheduler.take_events()) == ("old", RefusalReason.QUEUE_FULL)


def test_the_number_of_sessions_is_bounded():
    drafting = Drafting(max_sessions=1)
    drafting.open("a", 2)
    drafting.open("b", 2)
    assert refusal(drafting.scheduler.take_events()) == ("b", RefusalReason.QUEUE_FULL)


def test_when_kv_runs_out_the_newest_session_gives_way():
    drafting = Drafting(num_blocks=4)
    drafting.open("old", 7, draft_len=4)
    drafting.open("new", 7, draft_len=4)
    events = drafting.settle()
    assert [event.request_id for event in events if isinstance(event, Refusal)] == ["new"]
    assert [len(event.token_ids) for event in events if isinstance(event, DraftBlock)] == [4]
    assert drafting.scheduler.stats().num_preemptions == 1


def test_a_draining_scheduler_refuses_new_sessions_and_keeps_the_others():
    drafting = Drafting()
    drafting.open("a", 3)
    drafting.scheduler.is_draining = True
    drafting.open("b", 3)
    assert refusal(drafting.scheduler.take_events()) == ("b", RefusalReason.DRAINING)
    assert [event.request_id for event in drafting.settle()] == ["a"]


def test_a_failed_step_closes_its_sessions_only():
    drafting = Drafting(max_num_seqs=1)
    drafting.open("a", 3)
    drafting.open("b", 3)
    step = drafting.scheduler.schedule(0.0)
    drafting.scheduler.fail(step, "broken")
    assert refusal(drafting.scheduler.take_events()) == ("a", RefusalReason.INTERNAL)
    assert [event.request_id for event in drafting.settle()] == ["b"]
