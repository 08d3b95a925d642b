"""One unfinished rollout in this process."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.control import rollout
from cluster.control.cohort import CohortWindow, Measurement
from cluster.control.document import PolicyDocument
from cluster.control.finished_request import FinishedRequest, cohort_record
from cluster.control.rollout_entry import RolloutEntry, RolloutView, view_of
from cluster.control.rollout_rule import forced_percent, with_percent
from cluster.control.rollout_spec import parse_rollout
from cluster.control.store import Snapshot


class RolloutRun:
    """Owns what is known of a rollout: its entry as stored, and the window that is being measured."""

    def __init__(self, entry: RolloutEntry, revision: int) -> None:
        """Raises DocumentError if the entry's spec cannot be read."""
        self.spec = parse_rollout(entry.spec_text)
        self.entry = entry
        self.revision = revision  # the stored one
        self.checked_version = 0  # of the policy, in which nobody has edited the rule
        self._window: CohortWindow | None = None
        self._open_window()

    @property
    def state(self) -> rollout.RolloutState:
        return self.entry.state

    def is_checked(self, policy: Snapshot) -> bool:
        """Whether this version of the policy is known to have the rule as the rollout left it."""
        left_at = 0 if self.entry.applied is None else self.entry.applied.version
        return policy.version <= max(left_at, self.checked_version)

    def stored(self, entry: RolloutEntry, revision: int) -> None:
        """The store has this now."""
        self.entry, self.revision = entry, revision
        self._open_window()

    def take(self, records: Sequence[FinishedRequest]) -> None:
        """Add what finished requests say about the rule while it is measured."""
        applied = self.entry.applied
        if self._window is None or applied is None:
            return
        own = (cohort_record(record, self.entry.rule, applied.version) for record in records)
        self._window.add(record for record in own if record is not None)

    def measurement(self, now: float) -> Measurement | None:
        """The window until now, if a look at it is due."""
        is_due = rollout.measurement_due(self.spec, self.state, now)
        return self._window.measurement(now) if is_due and self._window is not None else None

    def edited(self, document: PolicyDocument) -> PolicyDocument | None:
        """The policy with the percentage that is pending; None if it has it already.

        Raises RuleEditedError if somebody else has changed the rule. A rollout that gives up takes it to 0 % anyway.
        """
        pending, entry = self.state.pending, self.entry
        if pending is None:
            return None
        if self.state.phase in (rollout.Phase.FAILED, rollout.Phase.ABORTED):
            return forced_percent(document, entry.rule, pending.percent)
        return with_percent(document, self.spec, entry.rule, entry.applied, pending.percent)

    def view(self, now: float) -> RolloutView:
        """The rollout as it is told."""
        if self._window is None:
            return view_of(self.entry, self.revision, None, None)
        measured = self._window.measurement(now)
        return view_of(self.entry, self.revision, len(measured.canary), len(measured.control))

    def _open_window(self) -> None:
        """A window is one of the present step since its beginning, or since somebody resumed it; else there is none."""
        since = self.state.since
        if not rollout.is_measuring(self.spec, self.state):
            self._window = None
        elif self._window is None or self._window.started_at != since:
            self._window = CohortWindow(since, self.spec.sample_capacity)
