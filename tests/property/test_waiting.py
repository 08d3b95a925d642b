"""Nobody waits for ever: not behind priorities, not behind other tenants, not for KV that others keep taking back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.admission import make_sequence
from cluster.core.block_pool import BlockPool
from cluster.core.draft_length import DraftLengthConfig, DraftLengthController
from cluster.core.kv_cache import KVCacheManager
from cluster.core.scheduler import Scheduler, SchedulerConfig
from cluster.core.tenant_shares import TenantShares
from cluster.core.waiting_line import AGING_INTERVAL, in_order_of_keeping
from cluster.messages.request import DraftLengthMode, HoldMode
from cluster.messages.rounds import Commit, Submit
from tests.fakes import ToyModel, ToyRunner, sampling

pytestmark = pytest.mark.property

MODEL = ToyModel()
MAX_LEN = 32
BLOCK_SIZE = 2


class Replica:
    """A scheduler with its runner; steps take a hundredth of a second."""

    def __init__(self, max_num_seqs: int, num_blocks: int, budget: int = 16) -> None:
        config = SchedulerConfig(max_num_seqs, budget, MAX_LEN, 1000, vocab_size=50, hold=HoldMode.NEVER)
        lengths = DraftLengthController(DraftLengthConfig(DraftLengthMode.FIXED))
        self.scheduler = Scheduler(config, KVCacheManager(BlockPool(num_blocks), BLOCK_SIZE), lengths)
        self.runner = ToyRunner(BLOCK_SIZE, MODEL)
        self.outputs: dict[str, tuple[int, ...]] = {}
        self.started: list[str] = []
        self.num_computed = 0
        self.now = 0.0

    def submit(self, request: Submit) -> None:
        assert self.scheduler.submit(request, self.now) is None

    def step(self) -> list[Commit]:
        output = self.scheduler.schedule(self.now)
        self.started += [item.request_id for item in output.scheduled if item.start == 0]
        self.num_computed += output.num_scheduled_tokens
        self.now += 0.01
        commits = self.scheduler.apply(output.scheduled, self.runner.execute(output), self.now, 0.01)
        for commit in commits:
            self.outputs[commit.request_id] = self.outputs.get(commit.request_id, ()) + commit.token_ids
        self.scheduler.check_integrity()
        return commits


def request(name: str, prompt_len: int, max_tokens: int, tenant: str, priority: int) -> Submit:
    prompt = tuple(range(prompt_len))
    return Submit(name, prompt, sampling(max_tokens, ignore_eos=True), tenant=tenant, priority=priority)


shapes = st.tuples(st.integers(1, 12), st.integers(1, 12), st.sampled_from("abcd"), st.integers(-2, 0))


@given(
    earlier=st.lists(shapes, max_size=5),
    stream=st.lists(shapes, min_size=1, max_size=5),
    max_num_seqs=st.integers(1, 4),
    priority=st.integers(0, 100),
)
@settings(max_examples=60)
def test_a_sequence_starts_after_a_bounded_number_of_others_whatever_keeps_coming(
    earlier: list[tuple[int, int, str, int]],
    stream: list[tuple[int, int, str, int]],
    max_num_seqs: int,
    priority: int,
) -> None:
    replica = Replica(max_num_seqs, num_blocks=200)
    for number, (prompt_len, max_tokens, tenant, urgent) in enumerate(earlier):
        replica.submit(request(f"earlier-{number}", prompt_len, max_tokens, tenant, urgent))
    replica.submit(request("low", 3, 2, "a", priority))
    num_sent = 0
    bound = AGING_INTERVAL * (len(earlier) + 1)
    while "low" not in replica.started:
        while replica.scheduler.stats().num_waiting < max_num_seqs + 2:  # the stream never runs dry
            prompt_len, max_tokens, tenant, urgent = stream[num_sent % len(stream)]
            tenant = f"{tenant}-{num_sent}" if urgent == 0 else tenant  # new tenants all the time, too
            replica.submit(request(f"stream-{num_sent}", prompt_len, max_tokens, tenant, urgent))
            num_sent += 1
        replica.step()
        assert len(replica.started) <= bound + max_num_seqs
        assert replica.num_computed <= (bound + max_num_seqs) * MAX_LEN


@given(
    shapes=st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2), st.booleans()), min_size=1, max_size=8),
    served=st.lists(st.lists(st.integers(0, 500), min_size=3, max_size=3), min_size=2, max_size=6),
)
def test_one_running_sequence_never_gives_way_however_shares_change_until_it_ends(
    shapes: list[tuple[str, int, bool]], served: list[list[int]]
) -> None:
    shares = TenantShares(max_lead=100)
    running = []
    for number, (tenant, priority, is_aged) in enumerate(shapes):
        submit = request(f"r{number}", 1, 1, tenant, priority)
        sequence = make_sequence(submit, SchedulerConfig(8, 16, MAX_LEN, 8, vocab_size=50), number, 0.0)
        sequence.is_aged = is_aged
        shares.enter(tenant)
        running.append(sequence)
    kept = set()
    for tokens in served:
        for tenant, num_tokens in zip("abc", tokens, strict=True):
            if any(tenant == other for other, _, _ in shapes):
                shares.charge(tenant, num_tokens)
        ordered = in_order_of_keeping(running, shares)
        assert sorted(ordered, key=lambda sequence: sequence.arrival) == running
        kept.add(ordered[0].request_id)
        victims = [(not item.is_aged, item.request.priority) for item in ordered[1:]]
        assert victims == sorted(victims), "lower priorities give way first"
    assert len(kept) == 1


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 16), st.integers(1, 16), st.sampled_from("abc"), st.integers(-1, 1)),
        min_size=2,
        max_size=8,
    ),
    num_blocks=st.integers(16, 26),
    max_num_seqs=st.integers(2, 8),
)
@settings(max_examples=150)
def test_sequences_that_take_kv_from_one_another_all_come_to_their_end(
    requests: list[tuple[int, int, str, int]], num_blocks: int, max_num_seqs: int
) -> None:
    replica = Replica(max_num_seqs, num_blocks)
    submits = [request(f"r{number}", *shape) for number, shape in enumerate(requests)]
    for submit in submits:
        replica.submit(submit)
    num_left, num_starts_before = len(submits), 0
    while num_left:
        ended = [commit for commit in replica.step() if commit.finish_reason is not None]
        num_left -= len(ended)
        if ended:
            num_starts_before = len(replica.started)
        restarts = len(replica.started) - num_starts_before
        assert restarts <= 2 * len(submits), "they preempt one another, and none gets on"
    for submit in submits:
        assert replica.outputs[submit.request_id] == MODEL.continuation(
            submit.prompt_token_ids, submit.sampling, submit.sampling.max_tokens
        )
    assert replica.scheduler.stats().num_used_blocks == 0
