"""Whether to keep sequences out of a step because their draft blocks are on their way.

Sitting out a step that runs anyway never pays: a block for n tokens that finds n + 1 committed still has its tail
with the chance that its head had to be accepted, so joining the step loses nothing. What can pay is to start the step
later, with more blocks. So BREAK_EVEN holds the whole step or nobody, for a time that depends on the tactic that
the pool has found to be the best (tactics.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from cluster.core.draft_length import DraftLengthController
from cluster.core.sequence import BlockWait, HoldOutcome, Sequence
from cluster.core.tactics import Tactic
from cluster.messages.request import HoldMode


@dataclass(frozen=True, slots=True)
class Hold:
    """Who sits out a step, and when that has to end even if nothing comes (None: nobody is held)."""

    sequences: frozenset[Sequence] = frozenset()
    wake_at: float | None = None


class HoldPolicy:
    """Owns the hold decision and the counts of its outcomes."""

    def __init__(self, mode: HoldMode, max_hold_s: float, draft_length: DraftLengthController) -> None:
        self.outcomes: Counter[HoldOutcome] = Counter()
        self._mode = mode
        self._max_hold_s = max_hold_s
        self._draft_length = draft_length
        self._idle_since: float | None = None  # when the step that is due now could have started

    def decide(self, decoding: SequenceOf[Sequence], others_run: bool, now: float) -> Hold:
        """Who of the decoding sequences waits for a block; `others_run` says that the step runs in any case."""
        if self._mode is HoldMode.NEVER:
            return Hold()
        waiting = [(sequence, wait) for sequence in decoding if (wait := sequence.open_wait()) is not None]
        hold = self._decide(decoding, waiting, others_run, now) if waiting else Hold()
        for sequence in hold.sequences:
            sequence.hold(now)
        for sequence, wait in waiting:
            if sequence not in hold.sequences:
                self._give_up(sequence, wait, now)
        if not hold.sequences:
            self._idle_since = None
        return hold

    def block_came(self, sequence: Sequence, outcome: HoldOutcome) -> None:
        """A block, or word that there is none, ends the wait; it counts if the sequence was held."""
        wait = sequence.open_wait()
        if wait is not None:
            wait.outcome = outcome
            self.outcomes[outcome] += sequence.held_since is not None

    def _decide(
        self, decoding: SequenceOf[Sequence], waiting: list[tuple[Sequence, BlockWait]], others_run: bool, now: float
    ) -> Hold:
        if self._mode is HoldMode.DEADLINE:
            return self._until_deadline(waiting, now)
        if others_run:
            return Hold()
        if self._idle_since is None:
            self._idle_since = now
        longest = min(wait.asked_at for _, wait in waiting) + self._max_hold_s
        until = min(longest, self._idle_since + self._worth_s(decoding, waiting, self._idle_since, now))
        return Hold(frozenset(decoding), until) if now < until else Hold()

    def _until_deadline(self, waiting: list[tuple[Sequence, BlockWait]], now: float) -> Hold:
        ends = {sequence: wait.asked_at + self._max_hold_s for sequence, wait in waiting}
        held = frozenset(sequence for sequence, end in ends.items() if now < end)
        return Hold(held, min((ends[sequence] for sequence in held), default=None))

    def _worth_s(
        self, decoding: SequenceOf[Sequence], waiting: list[tuple[Sequence, BlockWait]], since: float, now: float
    ) -> float:
        """How much later than `since` the step may start, for the sake of the blocks that should come until then.

        Started now it emits some tokens, E times as many if it starts later. Waiting beats decoding plainly up to
        (E - 1) steps. But blocks that come while the step runs are of use for the next one: beside that, waiting may
        cost as large a share of the step's time as the share of its tokens that it adds, (1 - 1/E) of a step. 0: not
        worth it.
        """
        waits = self._draft_length.tactics.trials(len(decoding)).tactic is Tactic.WAIT
        step_s = self._draft_length.step_s(len(decoding))
        if step_s is None:
            return 0.0
        expected = self._draft_length.expected_tokens
        emitted = sum(expected(sequence.draft_length, len(sequence.guesses())) for sequence in decoding)
        arrivals = [
            (self._arrives_at(sequence, wait, now), expected(sequence.draft_length, wait.num_draft_tokens))
            for sequence, wait in waiting
            if not sequence.draft_is_late
        ]
        total, worth_s = emitted, 0.0
        for arrives_at, num_expected in sorted(arrivals):
            total += num_expected - 1.0
            ratio = total / emitted
            share_s = step_s * (ratio - 1.0 if waits else 1.0 - 1.0 / ratio)
            if waits or arrives_at < since + share_s:
                worth_s = share_s
        return worth_s

    def _arrives_at(self, sequence: Sequence, wait: BlockWait, now: float) -> float:
        """When the block should be here: now, if it is overdue or if nothing is known."""
        arrival_s = self._draft_length.arrival_s(sequence.draft_length, wait.num_draft_tokens)
        return now if arrival_s is None else max(now, wait.asked_at + arrival_s)

    def _give_up(self, sequence: Sequence, wait: BlockWait, now: float) -> None:
        """The sequence runs without its block. If that is overdue, its drafter has to show itself before a hold."""
        was_held = sequence.held_since is not None
        wait.outcome = HoldOutcome.EXPIRED if was_held else HoldOutcome.NOT_WORTH
        sequence.draft_is_late |= was_held and self._arrives_at(sequence, wait, now) <= now
        self.outcomes[wait.outcome] += 1
