"""A rollout as the store keeps it: what was asked for, how far it is, and what it has left in the policy. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from pydantic import TypeAdapter

from cluster.control.analysis import MetricResult, Verdict
from cluster.control.rollout import FINISHED, Phase, RolloutState
from cluster.control.rollout_rule import AppliedRule

MAX_SPEC_BYTES: Final = 64 * 1024
MAX_EVENTS: Final = 100  # the first one and the latest
MAX_EVENT_CHARS: Final = 160  # of a reason; with the limits above, an entry always fits into the store


@dataclass(frozen=True, slots=True)
class RolloutEvent:
    """Where a rollout was from a moment on."""

    at: float
    phase: Phase
    step_index: int
    percent: float
    reason: str


@dataclass(frozen=True, slots=True)
class RolloutEntry:
    """One rollout. `applied` is the rule as the rollout knows it: None before it has made one of its own."""

    rollout_id: str
    rule: str
    spec_text: str
    author: str
    reason: str
    started_at: float
    state: RolloutState
    applied: AppliedRule | None = None
    events: tuple[RolloutEvent, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be done."""
        return self.state.phase in FINISHED and self.state.pending is None


_ENTRY = TypeAdapter(RolloutEntry)


def to_json(entry: RolloutEntry) -> str:
    return _ENTRY.dump_json(entry).decode()


def from_json(text: str) -> RolloutEntry:
    """Raises ValueError (pydantic's ValidationError) if it is not an entry."""
    return _ENTRY.validate_json(text, strict=True)


def moved(entry: RolloutEntry, state: RolloutState, now: float) -> RolloutEntry:
    """The entry in another state, which its history tells of if it is another step, phase or percentage."""
    event = RolloutEvent(now, state.phase, state.step_index, state.percent, _short(state.reason))
    last = entry.events[-1] if entry.events else None
    if last is not None and _place(last) == _place(event):
        return replace(entry, state=state)
    events = (*entry.events, event)
    return replace(entry, state=state, events=events[:1] + events[1:][-MAX_EVENTS + 1 :])


def _short(reason: str) -> str:
    return reason if len(reason) <= MAX_EVENT_CHARS else f"{reason[: MAX_EVENT_CHARS - 1]}…"


def _place(event: RolloutEvent) -> tuple[Phase, int, float]:
    return event.phase, event.step_index, event.percent


@dataclass(frozen=True, slots=True)
class RolloutView:
    """A rollout as it is told. `why`: what brought it to its phase; `reason`: the one it was started for.

    is_pending: the percentage is not known to be in force yet. verdict and results: of the last look of an analysis.
    num_canary and num_control: requests measured so far; None while nothing is.
    """

    rollout_id: str
    rule: str
    text: str
    author: str
    reason: str
    started_at: float
    revision: int
    phase: Phase
    step_index: int
    since: float
    percent: float
    is_pending: bool
    why: str
    verdict: Verdict | None
    results: tuple[MetricResult, ...]
    events: tuple[RolloutEvent, ...]
    num_canary: int | None = None
    num_control: int | None = None


def view_of(entry: RolloutEntry, revision: int, num_canary: int | None, num_control: int | None) -> RolloutView:
    """What is told of an entry at a revision of the store."""
    state, found = entry.state, entry.state.assessment
    return RolloutView(
        entry.rollout_id,
        entry.rule,
        entry.spec_text,
        entry.author,
        entry.reason,
        entry.started_at,
        revision,
        state.phase,
        state.step_index,
        state.since,
        state.percent,
        state.pending is not None,
        state.reason,
        None if found is None else found.verdict,
        () if found is None else found.results,
        entry.events,
        num_canary,
        num_control,
    )
