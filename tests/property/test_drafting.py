"""Whatever happens to the frames between router and draft replica, what it guesses is what a fresh session would."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.block_pool import BlockPool
from cluster.core.draft_scheduler import DraftSchedulerConfig
from cluster.core.kv_cache import KVCacheManager
from cluster.messages.request import SamplingParams
from cluster.messages.rounds import Close, Committed, DraftBlock, DraftCommand, DraftEvent, Open, PoolLoad
from cluster.runtime.drafter import DraftEngine
from tests.fakes import ToyModel, ToyRunner, sampling

pytestmark = pytest.mark.property

BLOCK_SIZE = 4
MAX_LEN = 60
TARGET = ToyModel()
DRAFT = ToyModel(agreement=0.7)


@dataclass
class Stream:
    """The router's end of one request: follows the target's truth and re-opens what is refused."""

    request_id: str
    truth: tuple[int, ...]
    committed_len: int
    sampling: SamplingParams
    min_confidence: float  # of every commit
    epoch: int = 0
    asked: dict[tuple[int, int], set[int]] = field(default_factory=dict)  # (epoch, committed_len) -> draft_len

    def open(self, draft_len: int) -> Open:
        self.asked.setdefault((self.epoch, self.committed_len), set()).add(draft_len)
        tokens = self.truth[: self.committed_len]
        return Open(self.request_id, self.epoch, tokens, self.sampling, draft_len)

    def commit(self, num_tokens: int, draft_len: int) -> Committed | None:
        base_len = self.committed_len
        token_ids = self.truth[base_len : base_len + num_tokens]
        if not token_ids:
            return None
        self.committed_len += len(token_ids)
        self.asked.setdefault((self.epoch, self.committed_len), set()).add(draft_len)
        least = min(draft_len, 2) if self.min_confidence else draft_len
        return Committed(self.request_id, self.epoch, base_len, token_ids, least, self.min_confidence, draft_len)

    def check(self, block: DraftBlock) -> None:
        lengths = {
            min(length, MAX_LEN - block.committed_len) for length in self.asked[block.epoch, block.committed_len]
        }
        prefix = self.truth[: block.committed_len]
        if DRAFT.chance(prefix, block.token_ids) < self.min_confidence:
            assert 0 < len(block.token_ids) <= max(lengths)
        else:
            assert len(block.token_ids) in lengths
        assert block.token_ids == DRAFT.continuation(prefix, self.sampling, len(block.token_ids))


class Wire:
    """Commands under way to a draft engine that is stepped by hand; some arrive while it makes a chain of guesses."""

    def __init__(self, num_blocks: int, num_streams: int, prefix_cache: bool) -> None:
        self.now = 0.0
        self.commands: list[DraftCommand] = []
        self.num_passes_to_arrival: int | None = None
        self.kv = KVCacheManager(BlockPool(num_blocks), BLOCK_SIZE, prefix_cache)
        runner = ToyRunner(BLOCK_SIZE, DRAFT)
        runner.before_pass = self.arrive
        runner.may_write = lambda block_id: block_id not in self.kv.pool.cache
        config = DraftSchedulerConfig(
            max_num_seqs=2,
            max_num_batched_tokens=16,
            max_model_len=MAX_LEN,
            max_sessions=3,
            vocab_size=TARGET.vocab_size,
        )
        self.engine = DraftEngine(runner, self.kv, config, on_events=self.receive, clock=lambda: self.now)
        self.streams = {f"r{i}": self._stream(i) for i in range(num_streams)}

    def _stream(self, index: int) -> Stream:
        prompt, how = tuple(range(1 + 13 * index)), sampling(seed=3, temperature=index % 2)
        truth = prompt + TARGET.continuation(prompt, how, MAX_LEN - len(prompt))
        return Stream(f"r{index}", truth, len(prompt), how, min_confidence=(0.3, 0.3, 0.0, 0.6)[index])

    def receive(self, events: list[DraftEvent]) -> None:
        for event in events:
            if isinstance(event, PoolLoad):
                continue
            stream = self.streams[event.request_id]
            if isinstance(event, DraftBlock):
                stream.check(event)
            elif event.epoch == stream.epoch:
                stream.epoch += 1
                self.commands.append(stream.open(draft_len=2))

    def arrive(self) -> None:
        """Deliver a command between two passes, when its time has come."""
        if self.num_passes_to_arrival is None:
            return
        self.num_passes_to_arrival -= 1
        if self.num_passes_to_arrival == 0 and self.commands:
            self.engine.handle([self.commands.pop(0)])

    def step(self) -> None:
        self.now += 0.3
        self.engine.step()
        self.kv.check_integrity()


@settings(max_examples=200, deadline=None)
@given(st.integers(8, 40), st.integers(1, 4), st.booleans(), st.data())
def test_guesses_equal_a_fresh_sessions_whatever_the_wire_does(num_blocks, num_streams, prefix_cache, data):
    wire = Wire(num_blocks, num_streams, prefix_cache)
    wire.commands = [stream.open(draft_len=3) for stream in wire.streams.values()]
    ops = ["commit", "commit", "deliver", "deliver", "step", "step", "step", "interrupt", "drop", "duplicate", "swap"]
    for op in data.draw(st.lists(st.sampled_from(ops), min_size=20, max_size=80)):
        if op == "commit":
            stream = wire.streams[data.draw(st.sampled_from(sorted(wire.streams)))]
            message = stream.commit(data.draw(st.integers(1, 6)), data.draw(st.integers(0, 5)))
            wire.commands += [message] if message else []
        elif op == "step":
            wire.step()
        elif op == "interrupt":
            wire.num_passes_to_arrival = data.draw(st.integers(1, 4))
        elif op == "deliver" and wire.commands:
            wire.engine.handle([wire.commands.pop(0)])
        elif op == "drop" and wire.commands:
            wire.commands.pop(0)
        elif op == "duplicate" and wire.commands:
            wire.commands.insert(0, wire.commands[0])
        elif op == "swap" and len(wire.commands) > 1:
            wire.commands[:2] = reversed(wire.commands[:2])
    wire.engine.handle([Close(request_id) for request_id in wire.streams])
    wire.step()
    assert wire.kv.pool.num_free == num_blocks
    assert wire.engine.faults.total == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 8)), min_size=1, max_size=6), st.integers(1, 3))
def test_every_session_gets_its_block_in_bounded_steps(requests, max_num_seqs):
    events: list[DraftEvent] = []
    kv = KVCacheManager(BlockPool(200), BLOCK_SIZE)
    config = DraftSchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=16, max_model_len=MAX_LEN, max_sessions=10, vocab_size=50
    )
    engine = DraftEngine(ToyRunner(BLOCK_SIZE, DRAFT), kv, config, events.extend, clock=lambda: 0.0)
    engine.handle([Open(f"r{i}", 0, tuple(range(n)), sampling(), k) for i, (n, k) in enumerate(requests)])
    num_steps = 0
    while engine.step() is not None:
        num_steps += 1
        assert num_steps < 200
    blocks = {event.request_id: event for event in events if isinstance(event, DraftBlock)}
    for i, (num_tokens, draft_len) in enumerate(requests):
        if draft_len:
            expected = DRAFT.continuation(tuple(range(num_tokens)), sampling(), draft_len)
            assert blocks[f"r{i}"].token_ids == expected
