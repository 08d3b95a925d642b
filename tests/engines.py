"""A target engine and a draft engine on toy models, joined by the smallest possible router."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cluster.core.block_pool import BlockPool
from cluster.core.draft_length import DraftLengthConfig, DraftLengthController
from cluster.core.draft_scheduler import DraftSchedulerConfig
from cluster.core.kv_cache import KVCacheManager
from cluster.core.scheduler import Scheduler, SchedulerConfig
from cluster.messages.request import DraftLengthMode, HoldMode
from cluster.messages.rounds import (
    Close,
    Commit,
    Committed,
    DraftBlock,
    DraftCommand,
    DraftEvent,
    Open,
    PoolLoad,
    Refusal,
    RefusalReason,
    Submit,
    TargetCommand,
    TargetEvent,
)
from cluster.runtime.drafter import DraftEngine
from cluster.runtime.engine import Engine
from tests.fakes import ToyModel, ToyRunner

BLOCK_SIZE = 4
MAX_LEN = 128
EOS = frozenset({0})


@dataclass
class Pool:
    """An engine, its runner, its KV, and what it said."""

    engine: Any
    runner: ToyRunner
    kv: KVCacheManager
    events: list[Any] = field(default_factory=list)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def output(self, request_id: str) -> tuple[int, ...]:
        commits = [event for event in self.of(Commit) if event.request_id == request_id]
        return tuple(token_id for commit in commits for token_id in commit.token_ids)

    def run(self) -> None:
        """Step until there is nothing to do before a command."""
        while self.engine.step() is not None:
            pass

    def is_free(self) -> bool:
        self.kv.check_integrity()
        return self.kv.pool.num_used == 0


def target_pool(
    num_blocks: int = 256,
    hold: HoldMode = HoldMode.DEADLINE,
    mode: DraftLengthMode = DraftLengthMode.FIXED,
    clock: Callable[[], float] | None = None,
    max_hold_s: float = 100.0,
    runner: ToyRunner | None = None,
    prefix_cache: bool = True,
    grammars: Any = None,
    **limits: int,
) -> Pool:
    runner = runner or ToyRunner(BLOCK_SIZE)
    kv = KVCacheManager(BlockPool(num_blocks), BLOCK_SIZE, prefix_cache)
    runner.may_write = lambda block_id: block_id not in kv.pool.cache
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_queued": 100, "max_model_len": MAX_LEN}
    config = SchedulerConfig(
        **{**defaults, **limits},
        vocab_size=runner.model.vocab_size,
        eos_token_ids=EOS,
        hold=hold,
        max_hold_s=max_hold_s,
    )
    scheduler = Scheduler(config, kv, DraftLengthController(DraftLengthConfig(mode)))
    engine = Engine(scheduler, runner, grammars=grammars, **({} if clock is None else {"clock": clock}))
    pool = Pool(engine, runner, kv)
    engine.on_events = pool.events.extend
    return pool


def draft_pool(
    agreement: float = 1.0,
    num_blocks: int = 256,
    clock: Callable[[], float] | None = None,
    runner: ToyRunner | None = None,
    prefix_cache: bool = True,
    grammars: Any = None,
    **limits: int,
) -> Pool:
    runner = runner or ToyRunner(BLOCK_SIZE, ToyModel(agreement=agreement))
    kv = KVCacheManager(BlockPool(num_blocks), BLOCK_SIZE, prefix_cache)
    runner.may_write = lambda block_id: block_id not in kv.pool.cache
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_sessions": 64, "max_model_len": MAX_LEN}
    config = DraftSchedulerConfig(**{**defaults, **limits}, vocab_size=runner.model.vocab_size, eos_token_ids=EOS)
    engine = DraftEngine(runner, kv, config, grammars=grammars, **({} if clock is None else {"clock": clock}))
    pool = Pool(engine, runner, kv)
    engine.on_events = pool.events.extend
    return pool


def plain_output(submit: Submit) -> tuple[int, ...]:
    """The only right output of a request, whatever happens to it on its way."""
    num_tokens = min(submit.sampling.max_tokens, MAX_LEN - len(submit.prompt_token_ids))
    output = ToyModel().continuation(submit.prompt_token_ids, submit.sampling, num_tokens)
    stops = frozenset(submit.sampling.stop_token_ids) | (frozenset() if submit.sampling.ignore_eos else EOS)
    return next((output[: i + 1] for i, token_id in enumerate(output) if token_id in stops), output)


Faults = Callable[[list[Any]], list[Any]]


def no_faults(frames: list[Any]) -> list[Any]:
    return frames


class TinyRouter:
    """Forwards rounds between a target and a draft engine; `faults` may drop, repeat, reorder or keep back frames.

    Only draft traffic suffers faults: a stream to a target either keeps its order or breaks.
    """

    def __init__(self, target: Pool, draft: Pool, faults: Faults = no_faults) -> None:
        self.target = target
        self.draft = draft
        self._faults = faults
        self._submits: dict[str, Submit] = {}
        self._epochs: dict[str, int] = {}
        self._undrafted: set[str] = set()
        target.engine.on_events = self.on_target
        draft.engine.on_events = self.on_draft
        self._to_draft: list[DraftCommand] = []
        self._to_target: list[TargetCommand] = []

    def submit(self, submit: Submit) -> None:
        self._submits[submit.request_id] = submit
        self._epochs[submit.request_id] = 0
        self.target.engine.handle([submit])
        self.draft.engine.handle([self._open(submit.request_id, 0)])

    def on_target(self, events: Iterable[TargetEvent]) -> None:
        self.target.events.extend(events)
        for event in events:
            if isinstance(event, Commit) and event.request_id in self._undrafted:
                self._decline(event.request_id)
            elif isinstance(event, Commit):
                self._to_draft.append(self._follow(event))
            elif isinstance(event, Refusal):
                self._to_draft.append(Close(event.request_id))

    def on_draft(self, events: Iterable[DraftEvent]) -> None:
        self.draft.events.extend(events)
        for event in events:
            if isinstance(event, DraftBlock):
                self._to_target.append(event)
            elif isinstance(event, Refusal) and event.epoch == self._epochs[event.request_id]:
                self._lose_draft(event)
            else:
                assert isinstance(event, PoolLoad | Refusal)

    def forward(self) -> None:
        """Deliver what is under way, as far as the faults let it."""
        to_draft, self._to_draft = self._faults(self._to_draft), []
        to_target, self._to_target = self._faults(self._to_target), []
        if to_draft:
            self.draft.engine.handle(to_draft)
        if to_target:
            self.target.engine.handle(to_target)

    def is_finished(self, request_id: str) -> bool:
        return any(
            event.request_id == request_id and (isinstance(event, Refusal) or event.finish_reason is not None)
            for event in self.target.events
            if not isinstance(event, PoolLoad)
        )

    def run(self, advance: Callable[[], None], max_rounds: int = 5000) -> None:
        """Step both engines in turn until every request has finished."""
        for _ in range(max_rounds):
            if all(self.is_finished(request_id) for request_id in self._submits):
                return
            advance()
            self.target.engine.step()
            self.draft.engine.step()
            self.forward()
        raise AssertionError("requests do not finish")

    def close(self) -> None:
        """What a stream's end does: every session is closed."""
        self.draft.engine.handle([Close(request_id) for request_id in self._submits])
        self.draft.engine.step()

    def _lose_draft(self, refusal: Refusal) -> None:
        """Open a new session where the old one lost track; decode plainly where there is no room for one."""
        self._decline(refusal.request_id)
        if refusal.reason is RefusalReason.INTERNAL:
            self._epochs[refusal.request_id] += 1
            self._to_draft.append(self._open(refusal.request_id, 2))
        else:
            self._undrafted.add(refusal.request_id)

    def _decline(self, request_id: str) -> None:
        self._to_target.append(DraftBlock(request_id, self._committed_len(request_id), ()))

    def _follow(self, commit: Commit) -> DraftCommand:
        if commit.finish_reason is not None:
            return Close(commit.request_id)
        epoch = self._epochs[commit.request_id]
        asked = commit.longest_draft_len, commit.min_confidence
        return Committed(commit.request_id, epoch, commit.base_len, commit.token_ids, *asked)

    def _open(self, request_id: str, draft_len: int) -> Open:
        submit = self._submits[request_id]
        token_ids = submit.prompt_token_ids + self.target.output(request_id)
        num_prompt = len(submit.prompt_token_ids)
        return Open(
            request_id, self._epochs[request_id], token_ids, submit.sampling, draft_len, num_prompt_tokens=num_prompt
        )

    def _committed_len(self, request_id: str) -> int:
        return len(self._submits[request_id].prompt_token_ids) + len(self.target.output(request_id))
