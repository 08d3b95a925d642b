"""What an engine drives: something that decides each step, and something that computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from cluster.core.step import SchedulerOutput, SchedulerStats, StepOutput, StepStats
from cluster.messages.rounds import Refusal, RefusalReason

CommandT_contra = TypeVar("CommandT_contra", contravariant=True)
EventT = TypeVar("EventT")


ShouldStop = Callable[[], bool]  # whether to end a chain of passes early; cheap


def never() -> bool:
    """Run chains to their end."""
    return False


class RunnerLost(RuntimeError):
    """A runner that will never run a step again: its engine ends, and its replica must be replaced."""


class Runner(Protocol):
    """Runs one step on a model."""

    def execute(self, step: SchedulerOutput, should_stop: ShouldStop = never) -> StepOutput:
        """Compute the rows' KV and sample where asked. `should_stop` is asked before each chained pass.

        Raises whatever went wrong, and the engine serves on; raises RunnerLost when there is no going on.
        """


class Work(Protocol[CommandT_contra, EventT]):
    """What an engine works on: decides each step, and says what commands, steps and faults lead to. One thread only."""

    is_draining: bool

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held for anyone."""

    def handle(self, command: CommandT_contra, now: float) -> None: ...

    def refusal_of(self, command: CommandT_contra, reason: RefusalReason, message: str) -> Refusal | None:
        """The answer to a command that is not taken, if it wants one. Changes nothing: any thread may ask."""

    def refuse(self, command: CommandT_contra, reason: RefusalReason, message: str) -> None:
        """Answer a command that could not be applied, and drop its request."""

    def refuse_all(self, reason: RefusalReason, message: str) -> None:
        """Drop every request and say so."""

    def schedule(self, now: float) -> SchedulerOutput: ...

    def apply(self, step: SchedulerOutput, output: StepOutput, now: float, step_s: float) -> StepStats: ...

    def fail(self, step: SchedulerOutput, message: str) -> None:
        """Drop the requests of a step that went wrong and say so."""

    def take_events(self) -> list[EventT]:
        """What there is to tell since the last call."""

    def stats(self) -> SchedulerStats: ...
