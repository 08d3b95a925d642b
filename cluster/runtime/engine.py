"""The target's engine: commits tokens, one ragged step at a time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from cluster.core.grammar import GrammarError, Grammars
from cluster.core.scheduler import Scheduler
from cluster.core.step import SchedulerOutput, SchedulerStats, StepOutput, StepStats
from cluster.messages.rounds import (
    Abort,
    Commit,
    DraftBlock,
    Refusal,
    RefusalReason,
    SetDraftLimit,
    Submit,
    TargetCommand,
    TargetEvent,
)
from cluster.runtime.engine_loop import EngineLoop
from cluster.runtime.grammar_gate import GrammarGate
from cluster.runtime.grammar_library import GrammarLibrary
from cluster.runtime.work import Runner


class TargetWork:
    """Owns the requests that a target replica has answered for, over the scheduler that owns their sequences."""

    def __init__(self, scheduler: Scheduler, grammars: Grammars | None = None) -> None:
        self.is_draining = False
        self._gate = GrammarGate(grammars)
        self._scheduler = scheduler
        self._live: dict[str, None] = {}  # submitted and not finished, oldest first
        self._events: list[TargetEvent] = []

    @property
    def is_idle(self) -> bool:
        return not self._live

    def handle(self, command: TargetCommand, now: float) -> None:
        match command:
            case Submit():
                self._submit(command, now)
            case DraftBlock():
                self._scheduler.propose(command, now)
            case SetDraftLimit():
                self._scheduler.set_draft_limit(command)
            case Abort():
                self._abort(command.request_id)

    def refusal_of(self, command: TargetCommand, reason: RefusalReason, message: str) -> Refusal | None:
        """The answer to a command that is not taken; only a submission wants one."""
        return Refusal(command.request_id, reason, message) if isinstance(command, Submit) else None

    def refuse(self, command: TargetCommand, reason: RefusalReason, message: str) -> None:
        if isinstance(command, DraftBlock | SetDraftLimit):
            return  # a hint; its request decodes on without it
        self._drop(command.request_id)
        self._events.append(Refusal(command.request_id, reason, message))

    def refuse_all(self, reason: RefusalReason, message: str) -> None:
        self._refuse_each(list(self._live), reason, message)

    def schedule(self, now: float) -> SchedulerOutput:
        for submit, received_at in self._gate.take_ready():
            self._queue(submit, received_at)
        self._tell(*self._scheduler.expire(now))
        return self._scheduler.schedule(now)

    def apply(self, step: SchedulerOutput, output: StepOutput, now: float, step_s: float) -> StepStats:
        for request_id, message in output.failed.items():
            self._refuse_each([request_id], RefusalReason.INTERNAL, message)
        self._refuse_each(list(output.stuck), RefusalReason.UNSUPPORTED, "grammar: the model has no token for it")
        commits = self._scheduler.apply(step.scheduled, output, now, step_s)
        self._tell(*commits)
        return step_stats(step, commits, step_s, self._scheduler.stats())

    def fail(self, step: SchedulerOutput, message: str) -> None:
        self._refuse_each([item.request_id for item in step.scheduled], RefusalReason.INTERNAL, message)

    def take_events(self) -> list[TargetEvent]:
        events, self._events = self._events, []
        return events

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def _submit(self, command: Submit, now: float) -> None:
        if command.request_id in self._live:
            return  # a second copy of the frame: the first one is being served
        if self.is_draining:
            self._events.append(Refusal(command.request_id, RefusalReason.DRAINING, "the target replica is draining"))
            return
        self._live[command.request_id] = None
        self._queue(command, now)

    def _queue(self, command: Submit, now: float) -> None:
        """Hand a live request to the scheduler, as soon as its grammar is compiled."""
        try:
            matcher = None if command.sampling.grammar is None else self._gate.find(command)
            if matcher is None and command.sampling.grammar is not None:
                self._gate.hold(command, now)
                return
            refusal = self._scheduler.submit(command, now, matcher)
        except GrammarError as error:
            refusal = Refusal(command.request_id, RefusalReason.UNSUPPORTED, f"grammar: {error}")
        if refusal is not None:
            self._live.pop(command.request_id, None)
            self._events.append(refusal)

    def _abort(self, request_id: str) -> None:
        if self._gate.forget(request_id):
            del self._live[request_id]
        else:
            self._tell(self._scheduler.abort(request_id))

    def _drop(self, request_id: str) -> None:
        self._gate.forget(request_id)
        self._scheduler.abort(request_id)
        self._live.pop(request_id, None)

    def _tell(self, *commits: Commit | None) -> None:
        for commit in commits:
            if commit is None:
                continue
            self._events.append(commit)
            if commit.finish_reason is not None:
                self._live.pop(commit.request_id, None)

    def _refuse_each(self, request_ids: Sequence[str], reason: RefusalReason, message: str) -> None:
        """Drop requests that are still live; a Refusal is their last event."""
        for request_id in request_ids:
            if request_id in self._live:
                self._drop(request_id)
                self._events.append(Refusal(request_id, reason, message))


class Engine(EngineLoop[TargetCommand, TargetEvent]):
    """A target replica's engine: Submit, DraftBlock, SetDraftLimit, Abort in; Commit, Refusal, PoolLoad out."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        on_events: Callable[[list[TargetEvent]], None] | None = None,
        on_step: Callable[[StepStats], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarLibrary | None = None,
    ) -> None:
        """`grammars`: without it, requests that have one are refused."""
        super().__init__(TargetWork(scheduler, grammars), runner, on_events, on_step, clock)
        if grammars is not None:
            grammars.on_ready = self._inbox.wake
        self.max_model_len = scheduler.config.max_model_len  # tokens of the longest sequence, prompt and output


def step_stats(
    step: SchedulerOutput, commits: Sequence[Commit], duration_s: float, scheduler: SchedulerStats
) -> StepStats:
    """What one step did, counted from its rows and from what it committed."""
    verified = [commit for commit in commits if commit.num_draft_tokens > 0]
    reached = Counter(position for commit in verified for position in range(commit.num_accepted_tokens))
    return StepStats(
        duration_s=duration_s,
        num_sequences=len(step.scheduled),
        num_scheduled_tokens=step.num_scheduled_tokens,
        num_draft_tokens=sum(commit.num_draft_tokens for commit in verified),
        num_accepted_tokens=sum(commit.num_accepted_tokens for commit in verified),
        num_emitted_tokens=sum(len(commit.token_ids) for commit in commits),
        num_verified_sequences=len(verified),
        accepted_per_position=tuple(reached[position] for position in range(max(reached, default=-1) + 1)),
        scheduler=scheduler,
    )
