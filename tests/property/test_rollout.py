"""Rollouts under any spec, any measurements, any commands, and crashes at any moment."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control import rollout
from cluster.control.analysis import Verdict
from cluster.control.cohort import Cohort, Measurement, RequestRecord
from cluster.control.rollout import FINISHED, Phase, RolloutCommandError, RolloutState
from cluster.control.rollout_spec import RolloutSpec, parse_rollout

pytestmark = pytest.mark.property


class Crash(Enum):
    """Where in an event the process is killed, and started again."""

    BEFORE_STORE = auto()
    BEFORE_APPLY = auto()
    BEFORE_CONFIRM = auto()


class Command(Enum):
    PAUSE = auto()
    RESUME = auto()
    ABORT = auto()
    PROMOTE = auto()


@dataclass(frozen=True)
class Event:
    """Time passes; then there is a measurement of some kind, or none, and perhaps somebody's command."""

    seconds: float
    verdict: Verdict | None
    command: Command | None
    crash: Crash | None


def measurement(verdict: Verdict, state: RolloutState, now: float) -> Measurement:
    count = 3 if verdict is Verdict.INCONCLUSIVE else 25
    slow = 9.0 if verdict is Verdict.FAIL else 1.0
    canary = tuple(RequestRecord(str(n), Cohort.CANARY, now, ttft_s=slow) for n in range(count))
    control = tuple(RequestRecord(str(n), Cohort.CONTROL, now, ttft_s=1.0) for n in range(25))
    return Measurement(state.since, now, canary, control)


@dataclass
class World:
    """What survives a crash: the stored state and the percentage in force. `seen` is every state that was stored."""

    spec: RolloutSpec
    stored: str
    percent: float = 0.0
    now: float = 0.0
    seen: list[tuple[RolloutState, Command | None]] = field(default_factory=list)

    @property
    def state(self) -> RolloutState:
        return rollout.from_json(self.stored)

    def store(self, state: RolloutState, command: Command | None = None) -> None:
        self.stored = rollout.to_json(state)
        self.seen.append((self.state, command))

    def happen(self, event: Event, crashes: bool) -> None:
        self.now += event.seconds
        if crashes and event.crash is Crash.BEFORE_STORE:
            self._next_state(event)
        self.store(self._next_state(event), event.command)
        if crashes and event.crash is Crash.BEFORE_CONFIRM:
            self._apply(self.state)
        self.store(rollout.advance(self.spec, self.state, None, self.now))  # as at any start
        self._carry_out()

    def _next_state(self, event: Event) -> RolloutState:
        state = self.state
        if event.command is not None:
            with contextlib.suppress(RolloutCommandError):
                return self._obey(state, event.command)
        measured = None if event.verdict is None else measurement(event.verdict, state, self.now)
        return rollout.advance(self.spec, state, measured, self.now)

    def _obey(self, state: RolloutState, command: Command) -> RolloutState:
        match command:
            case Command.PAUSE:
                return rollout.pause(state, self.now, "ann")
            case Command.RESUME:
                return rollout.resume(state, self.now, "ann")
            case Command.ABORT:
                return rollout.abort(state, self.now, "ann")
            case Command.PROMOTE:
                return rollout.promote(self.spec, state, self.now, "ann")

    def _apply(self, state: RolloutState) -> None:
        if state.pending is not None:
            self.percent = state.pending.percent

    def _carry_out(self) -> None:
        state = self.state
        while state.pending is not None:
            self._apply(state)
            state = rollout.confirm(state, state.pending.revision, self.now)
            self.store(state)
            self.store(rollout.advance(self.spec, state, None, self.now))
            state = self.state


@st.composite
def specs(draw: st.DrawFn) -> RolloutSpec:
    steps: list[dict[str, Any]] = []
    percent = 0.0
    for _ in range(draw(st.integers(1, 8))):
        kinds = ["set_percent", "pause"] + ["analyse"] * (0 < percent < 100) * 2
        match draw(st.sampled_from(kinds)):
            case "set_percent":
                percent = float(draw(st.integers(0, 100)))
                steps.append({"set_percent": percent})
            case "pause":
                steps.append({"pause": draw(st.sampled_from([{}, {"seconds": 5.0}]))})
            case "analyse":
                steps.append({"analyse": {"window_s": 10.0, "looks": draw(st.integers(1, 3))}})
    conditions = [{"metric": "ttft", "at_most": 2.0, "min_samples": 20}]
    return parse_rollout(
        {"schema": "paceline.rollout/v1", "target": {"rule": "r"}, "steps": steps, "conditions": conditions}
    )


events = st.lists(
    st.builds(
        Event,
        seconds=st.sampled_from([0.0, 2.0, 5.0, 10.0, 100.0]),
        verdict=st.sampled_from([Verdict.PASS, Verdict.PASS, Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE, None]),
        command=st.sampled_from([None] * 6 + [Command.RESUME] * 3 + [Command.PAUSE, Command.ABORT, Command.PROMOTE]),
        crash=st.sampled_from([None, *Crash]),
    ),
    max_size=20,
)


def run(spec: RolloutSpec, happenings: list[Event], crashes: bool) -> World:
    world = World(spec, rollout.to_json(rollout.start(0.0)))
    for event in happenings:
        world.happen(event, crashes)
    return world


@settings(max_examples=200)
@given(specs(), events)
def test_a_crash_at_any_moment_changes_nothing(spec: RolloutSpec, happenings: list[Event]) -> None:
    crashed, undisturbed = run(spec, happenings, crashes=True), run(spec, happenings, crashes=False)
    assert crashed.state == undisturbed.state
    assert crashed.percent == undisturbed.percent


@settings(max_examples=200)
@given(specs(), events)
def test_no_analysis_is_skipped(spec: RolloutSpec, happenings: list[Event]) -> None:
    """A step is left behind only by itself, an analysis only by a pass of its own window, or by hand."""
    seen = [(rollout.start(0.0), None), *run(spec, happenings, crashes=True).seen]
    for (before, _), (after, command) in itertools.pairwise(seen):
        if command is Command.PROMOTE and after.phase is Phase.SUCCESSFUL:
            continue
        assert before.step_index <= after.step_index
        passed = spec.steps[before.step_index : after.step_index]
        analyses = [step for step in passed if step.analyse is not None]
        assert len(analyses) <= 1
        assert sum(step.set_percent is not None for step in passed) <= 1, "each percentage gets its turn"
        assert before.pending is None or not passed
        if analyses:
            assert spec.steps[before.step_index].analyse is not None
            assert before.phase is Phase.RUNNING
            assert after.assessment is not None
            assert after.assessment.verdict is Verdict.PASS


@settings(max_examples=200)
@given(specs(), events)
def test_the_percentage_is_what_the_steps_say_and_nothing_after_the_end(
    spec: RolloutSpec, happenings: list[Event]
) -> None:
    world = run(spec, happenings, crashes=True)
    for state, _ in world.seen:
        done = [step.set_percent for step in spec.steps[: state.step_index] if step.set_percent is not None]
        gave_up = state.phase in (Phase.FAILED, Phase.ABORTED)
        assert state.percent == (0.0 if gave_up else done[-1] if done else 0.0)
    finished = [(state.phase, state.percent) for state, _ in world.seen if state.phase in FINISHED]
    assert len(set(finished)) <= 1
    assert not finished or world.state.phase in FINISHED
    assert world.percent == world.state.percent


@settings(max_examples=200)
@given(specs(), events)
def test_an_inconclusive_rollout_moves_by_hand_only(spec: RolloutSpec, happenings: list[Event]) -> None:
    world = World(spec, rollout.to_json(rollout.start(0.0)))
    for event in happenings:
        before = world.state
        world.happen(event, crashes=True)
        if before.phase is Phase.INCONCLUSIVE and event.command is None:
            assert world.state == before


@given(specs(), st.lists(st.builds(Event, st.just(100.0), st.just(Verdict.PASS), st.none(), st.none()), min_size=1))
def test_a_good_canary_ends_successful_at_the_last_percentage(spec: RolloutSpec, happenings: list[Event]) -> None:
    """With a resume where somebody has to, at most a few events per step are needed."""
    world = run(spec, happenings, crashes=False)
    for _ in range(4 * len(spec.steps)):
        needs_hand = world.state.phase is Phase.PAUSED
        world.happen(Event(100.0, Verdict.PASS, Command.RESUME if needs_hand else None, None), crashes=False)
    last = [step.set_percent for step in spec.steps if step.set_percent is not None]
    assert world.state.phase is Phase.SUCCESSFUL
    assert world.percent == (last[-1] if last else 0.0)


@given(specs(), events)
def test_an_old_confirmation_changes_nothing(spec: RolloutSpec, happenings: list[Event]) -> None:
    for state, _ in run(spec, happenings, crashes=False).seen:
        assert rollout.confirm(state, state.percent_revision - 1, 1e6) == state
        assert rollout.confirm(replace(state, pending=None), state.percent_revision, 1e6) == replace(
            state, pending=None
        )
