"""Whether and how a pool speculates, found by trying: tokens per second as they really come under each tactic.

The draft length follows from a model of costs, and a model leaves things out: whether drafts and targets share
processors, what hops and hand-overs take, blocks that come too late. So a pool tries each tactic for some steps, goes
on with the best, and tries the others again, ever more rarely while that is in vain. What speculation can lose beside
plain decoding is what those trials lose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cluster.messages.request import DraftLengthMode, HoldMode

_SETTLING_STEPS = 2  # after a change: blocks asked for before it, drafts that have to catch up
_TRIAL_STEPS = 8
_HOPELESS = 0.8  # a trial that is so much slower ends halfway
_FIRST_INTERVAL = 192  # steps between two trials of a tactic; doubles with each vain one
_MAX_INTERVAL = 768
_MAX_PASSED = 64  # steps that tell a trial nothing, since they read prompts too; then it is put off
_MARGIN = 1.05  # how much better than the present one another tactic must be
_DECAY = 0.98  # of a tally, per step
_STALE = 0.25  # weight of what an earlier trial found
_OUTLIER = 4.0  # a step that took so many times the average counts as that many times: something else held it up


class Tactic(Enum):
    """What sequences that may speculate do."""

    PLAIN = "plain"  # ask for no guesses
    OVERLAP = "overlap"  # ask, and decode on meanwhile unless blocks are all but there
    WAIT = "wait"  # ask, and start steps later as long as that can pay


def tactics_for(mode: DraftLengthMode, hold: HoldMode) -> tuple[Tactic, ...]:
    """What a pool may choose from, the most hopeful first; a fixed draft length leaves no choice."""
    if mode is DraftLengthMode.FIXED:
        return (Tactic.OVERLAP,)
    match hold:
        case HoldMode.BREAK_EVEN:
            return Tactic.WAIT, Tactic.OVERLAP, Tactic.PLAIN
        case HoldMode.DEADLINE:
            return Tactic.WAIT, Tactic.PLAIN
        case HoldMode.NEVER:
            return Tactic.OVERLAP, Tactic.PLAIN


@dataclass(slots=True)
class _Tally:
    """Decaying sums over the steps of one tactic."""

    num_steps: float = 0.0
    num_tokens: float = 0.0
    seconds: float = 0.0
    interval: int = _FIRST_INTERVAL
    due_at: int = 0  # the step at which the next trial is due

    @property
    def rate(self) -> float:
        """Tokens per second of a sequence; 0 before the first step."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def observe(self, num_tokens: float, seconds: float) -> None:
        if self.num_steps:
            seconds = min(seconds, _OUTLIER * self.seconds / self.num_steps)
        self.fade(_DECAY)
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.seconds += seconds

    def fade(self, weight: float) -> None:
        self.num_steps *= weight
        self.num_tokens *= weight
        self.seconds *= weight


@dataclass(slots=True)
class Trials:
    """Owns the choice among tactics for one size of batches, and when to doubt it."""

    tactics: tuple[Tactic, ...]
    tactic: Tactic = field(init=False)
    is_trial: bool = field(init=False)
    _tallies: dict[Tactic, _Tally] = field(init=False)
    _best: Tactic = field(init=False)
    _step: int = 0
    _unsettled: int = _SETTLING_STEPS
    _change_at: int = _TRIAL_STEPS
    _num_passed: int = 0

    def __post_init__(self) -> None:
        self.tactic = self._best = self.tactics[0]
        self.is_trial = len(self.tactics) > 1
        self._tallies = {tactic: _Tally() for tactic in self.tactics}

    def gain(self) -> float | None:
        """Tokens per second under the present tactic over plain decoding's; None while either is unknown.

        At least 1: had it been less when they were compared, the tactic would be another, and later, as contexts grow,
        they are no longer measured under the same conditions.
        """
        plain = self._tallies.get(Tactic.PLAIN)
        present = self._tallies[self.tactic].rate
        return max(1.0, present / plain.rate) if plain is not None and plain.rate and present else None

    def pass_by(self) -> None:
        """A step has run that does not count."""
        self._num_passed += self.is_trial
        if self._num_passed > _MAX_PASSED:
            self.is_trial = False
            self._tallies[self.tactic].due_at = self._step + _FIRST_INTERVAL
            self._turn_to(self._best, self._step + _FIRST_INTERVAL)

    def observe(self, num_tokens: float, seconds: float) -> None:
        """A step of nothing but decodes emitted so many tokens, `seconds` after the one before it."""
        if len(self.tactics) == 1:
            return
        if self._unsettled:
            self._unsettled -= 1
            return
        self._step += 1
        self._tallies[self.tactic].observe(num_tokens, seconds)
        if self._step >= self._change_at or self._is_hopeless:
            self._judge()

    def _judge(self) -> None:
        """A trial has ended, or the next one is due."""
        if self.is_trial:
            self._end_trial()
        rival = min(self._rivals, key=lambda tactic: self._tallies[tactic].due_at)
        tally = self._tallies[rival]
        self.is_trial = tally.due_at <= self._step
        if self.is_trial:
            tally.fade(_STALE)
            self._turn_to(rival, self._step + _TRIAL_STEPS)
        else:
            self._turn_to(self._best, tally.due_at)

    @property
    def _is_hopeless(self) -> bool:
        is_halfway = self.is_trial and self._step >= self._change_at - _TRIAL_STEPS // 2
        return is_halfway and self._tallies[self.tactic].rate < _HOPELESS * self._tallies[self._best].rate

    def _end_trial(self) -> None:
        tried, best = self._tallies[self.tactic], self._tallies[self._best]
        if self.tactic is self._best or tried.rate > _MARGIN * best.rate:
            self._best = self.tactic
            for tally in self._tallies.values():
                tally.interval = _FIRST_INTERVAL
        else:
            tried.due_at = self._step + tried.interval
            tried.interval = min(2 * tried.interval, _MAX_INTERVAL)

    @property
    def _rivals(self) -> list[Tactic]:
        return [tactic for tactic in self.tactics if tactic is not self._best]

    def _turn_to(self, tactic: Tactic, until: int) -> None:
        self._change_at = until
        self._num_passed = 0
        if tactic is not self.tactic:
            self.tactic = tactic
            self._unsettled = _SETTLING_STEPS


class TacticChoice:
    """Owns a pool's trials, by sizes of batches in powers of two, the time between its steps, and a count of them."""

    def __init__(self, tactics: tuple[Tactic, ...]) -> None:
        self._tactics = tactics
        self.num_steps = dict.fromkeys(tactics if self.has_choice else (), 0)
        self._trials: dict[int, Trials] = {}
        self._last: tuple[int, float] | None = None  # sequences and end of the step before, if it only decoded

    @property
    def has_choice(self) -> bool:
        return len(self._tactics) > 1

    def trials(self, num_sequences: int) -> Trials:
        """For steps of so many sequences."""
        size = num_sequences.bit_length()
        if size not in self._trials:
            self._trials[size] = Trials(self._tactics)
        return self._trials[size]

    def observe(self, num_sequences: int, num_tokens: float, now: float) -> None:
        """A step of so many sequences, no prompt among them, has emitted `num_tokens` by `now`."""
        trials = self.trials(num_sequences)
        self.num_steps[trials.tactic] += 1
        if self._last is not None and self._last[0] == num_sequences:
            trials.observe(num_tokens / num_sequences, now - self._last[1])
        else:
            trials.pass_by()
        self._last = num_sequences, now

    def skip(self, num_sequences: int) -> None:
        """A step of another kind has run, of so many sequences."""
        self.rest()
        self.trials(num_sequences).pass_by()

    def rest(self) -> None:
        """What comes next does not begin with the end of a decode."""
        self._last = None
