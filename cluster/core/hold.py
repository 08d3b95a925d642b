"""Whether to keep a sequence out of a step because its draft block is on its way."""

from __future__ import annotations

from collections import Counter

from cluster.core.draft_length import DraftLengthController
from cluster.core.sequence import BlockWait, HoldOutcome, Sequence
from cluster.messages import HoldMode


class HoldPolicy:
    """Owns the hold decision and the counts of its outcomes."""

    def __init__(self, mode: HoldMode, max_hold_s: float, draft_length: DraftLengthController) -> None:
        self.outcomes: Counter[HoldOutcome] = Counter()
        self._mode = mode
        self._max_hold_s = max_hold_s
        self._draft_length = draft_length

    def until(self, sequence: Sequence, num_running: int, now: float) -> float | None:
        """When the sequence must run even without its block; None: run it now.

        Decided once per wait, so that a hold never lasts longer than it was worth when it began.
        """
        wait = sequence.wait
        if wait is None or wait.outcome is not None or self._mode is HoldMode.NEVER or sequence.guesses():
            return None
        if wait.hold_until is None:
            wait.hold_until = self._decide(sequence, wait, num_running, now)
            if wait.hold_until <= now:
                self._close(wait, HoldOutcome.NOT_WORTH)
                return None
            wait.held_since = now
        if now < wait.hold_until:
            return wait.hold_until
        sequence.draft_is_late = True
        self._close(wait, HoldOutcome.EXPIRED)
        return None

    def block_came(self, sequence: Sequence, outcome: HoldOutcome) -> None:
        """A block, or word that there is none, ends the wait; it counts if the sequence was held."""
        wait = sequence.wait
        if wait is not None and wait.outcome is None and wait.held_since is not None:
            self._close(wait, outcome)
        elif wait is not None and outcome is HoldOutcome.DECLINED:
            sequence.wait = None  # nothing will come: don't begin a hold

    def _close(self, wait: BlockWait, outcome: HoldOutcome) -> None:
        wait.outcome = outcome
        self.outcomes[outcome] += 1

    def _decide(self, sequence: Sequence, wait: BlockWait, num_running: int, now: float) -> float:
        latest = wait.asked_at + self._max_hold_s
        if self._mode is HoldMode.DEADLINE:
            return latest
        return min(latest, now + self._worth_s(sequence, wait, num_running, now))

    def _worth_s(self, sequence: Sequence, wait: BlockWait, num_running: int, now: float) -> float:
        """How long waiting beats decoding plainly, or 0 if the block will probably come later than that.

        A plain step spends step_s on one token; the block saves all but 1/E of what its E tokens would cost.
        """
        step_s = self._draft_length.step_s(num_running)
        if step_s is None or sequence.draft_is_late:
            return 0.0
        expected = self._draft_length.expected_tokens(sequence.draft_length, wait.num_draft_tokens)
        worth_s = (1.0 - 1.0 / expected) * step_s
        arrival_s = self._draft_length.arrival_s(sequence.draft_length, wait.num_draft_tokens)
        if arrival_s is not None and wait.asked_at + arrival_s - now >= worth_s:
            return 0.0
        return worth_s
