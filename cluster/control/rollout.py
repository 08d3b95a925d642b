"""How a rollout goes from step to step, as a pure function of its state, what was measured, and the time.

    RUNNING ──▶ PAUSED ──▶ RUNNING ──▶ … ──▶ SUCCESSFUL        the last percentage stays
       │           after its time, or by hand
       ├──▶ FAILED           an analysis failed: 0 % at once, for good
       ├──▶ INCONCLUSIVE     an analysis could not tell: holds its percentage until resumed, which measures afresh
       └──▶ ABORTED          by hand: 0 % at once, for good; or because somebody else moved the percentage, which stays

Who carries a rollout out writes each new state down first, then does what it says, then confirms it:

    state = advance(spec, state, …)          → store it
    if state.pending: set the percentage     (the same percentage again does nothing)
    state = confirm(state, revision, now)    → store it

A crash anywhere in between repeats the action that the stored state still has pending, and the rollout goes on from
the same step. Nothing else happens while an action is pending: the times of a step count from the moment when the
percentage before it was in force.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from pydantic import TypeAdapter

from cluster.control.analysis import Assessment, Verdict, assess
from cluster.control.cohort import Measurement
from cluster.control.rollout_spec import Analyse, Pause, RolloutSpec


class Phase(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    INCONCLUSIVE = "inconclusive"
    SUCCESSFUL = "successful"
    FAILED = "failed"
    ABORTED = "aborted"


FINISHED = frozenset({Phase.SUCCESSFUL, Phase.FAILED, Phase.ABORTED})


class RolloutCommand(StrEnum):
    """What somebody may do to a rollout by hand."""

    PAUSE = "pause"
    RESUME = "resume"
    PROMOTE = "promote"
    ABORT = "abort"


class RolloutCommandError(ValueError):
    """A rollout in this phase cannot do what was asked."""


@dataclass(frozen=True, slots=True)
class SetPercent:
    """Bring the target's percentage to this value. `revision` counts the percentages of one rollout."""

    percent: float
    revision: int


@dataclass(frozen=True, slots=True)
class RolloutState:
    """Everything that is known of a rollout besides its spec. `since` is when the present step or window began."""

    phase: Phase = Phase.RUNNING
    step_index: int = 0  # the number of steps, once it is successful
    since: float = 0.0
    percent: float = 0.0  # what was set last, or is pending
    percent_revision: int = 0
    pending: SetPercent | None = None
    looks_done: int = 0  # of the present analysis
    reason: str = ""
    assessment: Assessment | None = None  # the last one
    is_held: bool = False  # paused by hand, wherever it was


_STATE = TypeAdapter(RolloutState)


def to_json(state: RolloutState) -> str:
    return _STATE.dump_json(state).decode()


def from_json(text: str) -> RolloutState:
    """Raises ValueError (pydantic's ValidationError) if it is not a state."""
    return _STATE.validate_json(text, strict=True)


def start(now: float) -> RolloutState:
    return RolloutState(since=now, reason="started")


# --- by itself -------------------------------------------------------------------------------------------------------


def is_measuring(spec: RolloutSpec, state: RolloutState) -> bool:
    """Whether an analysis is running, of what happens from `state.since` on."""
    return _analysis(spec, state) is not None


def measurement_due(spec: RolloutSpec, state: RolloutState, now: float) -> bool:
    """Whether `advance` wants a measurement from `state.since` until now."""
    analyse = _analysis(spec, state)
    return analyse is not None and _looks_passed(analyse, state, now) > state.looks_done


def advance(spec: RolloutSpec, state: RolloutState, measurement: Measurement | None, now: float) -> RolloutState:
    """Go on as far as time and measurement allow; the same state if they do not.

    A measurement is used only when one is due and if none of it is from before the window. An analysis without one
    waits. Time that runs backwards only makes a step longer.
    """
    while True:
        following = _advance_once(spec, state, measurement, now)
        if following == state:
            return state
        state, measurement = following, None


def confirm(state: RolloutState, revision: int, now: float) -> RolloutState:
    """The pending percentage of this revision is in force. Any other revision changes nothing."""
    if state.pending is None or state.pending.revision != revision:
        return state
    return replace(state, pending=None, since=now)


def measure_afresh(spec: RolloutSpec, state: RolloutState, now: float) -> RolloutState:
    """Begin the window of a running analysis again, because what was measured is lost."""
    return state if _analysis(spec, state) is None else replace(state, since=now, looks_done=0)


def _advance_once(spec: RolloutSpec, state: RolloutState, measurement: Measurement | None, now: float) -> RolloutState:
    if state.pending is not None or state.is_held or state.phase in FINISHED or state.phase is Phase.INCONCLUSIVE:
        return state
    if state.step_index == len(spec.steps):
        return replace(state, phase=Phase.SUCCESSFUL, since=now, reason="every step is done")
    step = spec.steps[state.step_index]
    if step.pause is not None:
        return _pause(state, step.pause, now)
    if step.analyse is not None:
        return _analyse(spec, state, step.analyse, measurement, now)
    percent = state.percent if step.set_percent is None else step.set_percent
    return _with_percent(_next_step(state, now, f"{percent:g} %: {state.reason}"), percent)


def _pause(state: RolloutState, pause: Pause, now: float) -> RolloutState:
    if pause.seconds is not None and now >= state.since + pause.seconds:
        return _next_step(state, now, f"paused for {pause.seconds:g} s")
    until = "resumed" if pause.seconds is None else f"{pause.seconds:g} s are over"
    return replace(state, phase=Phase.PAUSED, reason=f"paused until {until}")


def _analyse(
    spec: RolloutSpec, state: RolloutState, analyse: Analyse, measurement: Measurement | None, now: float
) -> RolloutState:
    looks = _looks_passed(analyse, state, now)
    if looks <= state.looks_done or measurement is None or measurement.started_at < state.since:
        return state
    found = assess(spec.metric_specs(), measurement, analyse.looks)
    state = replace(state, looks_done=looks, assessment=found, reason=found.reason)
    if found.verdict is Verdict.FAIL:
        return _give_up(state, Phase.FAILED, now)
    if looks < analyse.looks:
        return state
    if found.verdict is Verdict.PASS:
        return _next_step(state, now, found.reason)
    return replace(state, phase=Phase.INCONCLUSIVE, since=now)


def _looks_passed(analyse: Analyse, state: RolloutState, now: float) -> int:
    """How many looks are due by now."""
    return max(0, min(analyse.looks, int((now - state.since) * analyse.looks / analyse.window_s)))


def _analysis(spec: RolloutSpec, state: RolloutState) -> Analyse | None:
    """The analysis that is running now."""
    if state.pending is not None or state.phase is not Phase.RUNNING or state.step_index == len(spec.steps):
        return None
    return spec.steps[state.step_index].analyse


# --- by hand ---------------------------------------------------------------------------------------------------------


def obey(spec: RolloutSpec, state: RolloutState, command: RolloutCommand, now: float, by: str) -> RolloutState:
    """What the command makes of it. Raises RolloutCommandError."""
    match command:
        case RolloutCommand.PAUSE:
            return pause(state, now, by)
        case RolloutCommand.RESUME:
            return resume(state, now, by)
        case RolloutCommand.PROMOTE:
            return promote(spec, state, now, by)
        case RolloutCommand.ABORT:
            return abort(state, now, by)


def pause(state: RolloutState, now: float, by: str) -> RolloutState:
    """Hold where it is, until resumed. Raises RolloutCommandError unless it is running, or paused for a time."""
    if state.is_held or state.phase not in (Phase.RUNNING, Phase.PAUSED):
        raise RolloutCommandError(f"a rollout that is {state.phase} cannot be paused")
    return replace(state, phase=Phase.PAUSED, is_held=True, since=now, reason=f"paused by {by}")


def resume(state: RolloutState, now: float, by: str) -> RolloutState:
    """End a pause, or measure an inconclusive analysis afresh. Raises RolloutCommandError in any other phase.

    What was paused by hand begins its step again.
    """
    if state.is_held:
        return replace(state, phase=Phase.RUNNING, is_held=False, since=now, looks_done=0, reason=f"resumed by {by}")
    if state.phase is Phase.PAUSED:
        return _next_step(state, now, f"resumed by {by}")
    if state.phase is Phase.INCONCLUSIVE:
        return replace(state, phase=Phase.RUNNING, since=now, looks_done=0, reason=f"resumed by {by}")
    raise RolloutCommandError(f"a rollout that is {state.phase} cannot be resumed")


def abort(state: RolloutState, now: float, by: str) -> RolloutState:
    """0 % at once, for good. Raises RolloutCommandError if the rollout is finished."""
    _check_unfinished(state, "aborted")
    return _give_up(replace(state, reason=f"aborted by {by}"), Phase.ABORTED, now)


def step_aside(state: RolloutState, now: float, why: str) -> RolloutState:
    """End because somebody else moves the percentage: what they have set stays."""
    if state.pending is None:
        _check_unfinished(state, "aborted")
    return replace(state, phase=Phase.ABORTED, pending=None, is_held=False, since=now, reason=why)


def promote(spec: RolloutSpec, state: RolloutState, now: float, by: str) -> RolloutState:
    """Go to the last percentage at once, on somebody's own judgement. Raises RolloutCommandError if it is finished."""
    _check_unfinished(state, "promoted")
    last = [step.set_percent for step in spec.steps if step.set_percent is not None]
    state = replace(state, step_index=len(spec.steps), since=now, phase=Phase.SUCCESSFUL, reason=f"promoted by {by}")
    state = replace(state, is_held=False)
    return _with_percent(state, last[-1]) if last else state


def _check_unfinished(state: RolloutState, what: str) -> None:
    if state.phase in FINISHED:
        raise RolloutCommandError(f"a rollout that is {state.phase} cannot be {what}")


# --- transitions -----------------------------------------------------------------------------------------------------


def _next_step(state: RolloutState, now: float, reason: str) -> RolloutState:
    index = state.step_index + 1
    return replace(state, phase=Phase.RUNNING, step_index=index, since=now, looks_done=0, reason=reason)


def _give_up(state: RolloutState, phase: Phase, now: float) -> RolloutState:
    return _with_percent(replace(state, phase=phase, is_held=False, since=now), 0.0)


def _with_percent(state: RolloutState, percent: float) -> RolloutState:
    revision = state.percent_revision + 1
    return replace(state, percent=percent, percent_revision=revision, pending=SetPercent(percent, revision))
