"""How many rows of prompts a step may have beside running streams: as many as stretch it to about twice its time.

A row of a prompt costs its share of the model's products, and attention to everything before it, which for a long
prompt is most of it. Both prices are measured online, as what a step took beyond the same step without the prompt:

    extra seconds = row_s * rows + pair_s * pairs,     pairs = sum over rows of the tokens that each attends to
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, sqrt

from cluster.core.draft_length import DraftLengthController
from cluster.core.step import ScheduledSequence

_MEMORY = 0.98  # weight of the measurements before the latest
_RIDGE = 1e-5  # relative: shares a cost between rows and pairs while all chunks look alike
_OUTLIER = 4.0  # a measurement so many times the prediction counts as that many times
_GROWTH = 2  # a step may have so many times the rows that recent ones had: prices are not known beyond
_FIRST_ROWS = 8  # while nothing is measured
_MAX_MIXED_STEPS = 64  # then one without prompts, to know again what that takes


def num_pairs(start: int, num_rows: int) -> float:
    """Tokens that rows start … start + num_rows attend to, each to itself and all before it."""
    return num_rows * start + num_rows * (num_rows + 1) / 2


class PromptCost:
    """Owns the prices of a row and of a pair: least squares over what chunks took, with slow forgetting."""

    def __init__(self) -> None:
        self.row_s = 0.0
        self.pair_s = 0.0
        self._rows_rows = self._rows_pairs = self._pairs_pairs = 0.0
        self._rows_s = self._pairs_s = 0.0

    def observe(self, num_rows: int, pairs: float, seconds: float) -> None:
        """A step's chunks of so many rows and pairs took `seconds` more than the step without them."""
        predicted = self.row_s * num_rows + self.pair_s * pairs
        if predicted:
            seconds = min(seconds, _OUTLIER * predicted)
        self._rows_rows = _MEMORY * self._rows_rows + num_rows * num_rows
        self._rows_pairs = _MEMORY * self._rows_pairs + num_rows * pairs
        self._pairs_pairs = _MEMORY * self._pairs_pairs + pairs * pairs
        self._rows_s = _MEMORY * self._rows_s + num_rows * seconds
        self._pairs_s = _MEMORY * self._pairs_s + pairs * seconds
        self._solve()

    def _solve(self) -> None:
        rows_rows, pairs_pairs = self._rows_rows * (1 + _RIDGE), self._pairs_pairs * (1 + _RIDGE)
        determinant = rows_rows * pairs_pairs - self._rows_pairs**2
        row_s = (self._rows_s * pairs_pairs - self._pairs_s * self._rows_pairs) / determinant
        pair_s = (self._pairs_s * rows_rows - self._rows_s * self._rows_pairs) / determinant
        if row_s < 0:
            row_s, pair_s = 0.0, self._pairs_s / pairs_pairs
        elif pair_s < 0:
            row_s, pair_s = self._rows_s / rows_rows, 0.0
        self.row_s, self.pair_s = max(0.0, row_s), max(0.0, pair_s)

    def seconds(self, start: int, num_rows: int) -> float:
        return self.row_s * num_rows + self.pair_s * num_pairs(start, num_rows)

    def rows_within(self, seconds: float, start: int) -> float:
        """How many rows from position `start` on take `seconds`; infinite if rows cost nothing."""
        linear, square = self.row_s + self.pair_s * (start + 0.5), self.pair_s / 2
        if linear <= 0:
            return inf
        return 2 * seconds / (linear + sqrt(linear * linear + 4 * square * seconds))


@dataclass(slots=True)
class PromptAllowance:
    """What the prompts of one step may still take; one row at least of those that come first."""

    cost: PromptCost
    num_rows: float = inf
    seconds: float = inf
    num_owed: int = 1  # rows that there are whatever they cost, so that prompts always get on

    def take(self, start: int, num_wanted: int, share: float = 1.0) -> int:
        """Rows for a prompt computed up to `start`: at most `num_wanted` and `share` of what is left, possibly none."""
        affordable = min(share * self.num_rows, self.cost.rows_within(share * self.seconds, start))
        num_rows = int(min(num_wanted, max(affordable, self.num_owed)))
        self.num_owed = max(0, self.num_owed - num_rows)
        self.num_rows = max(0.0, self.num_rows - num_rows)
        self.seconds = max(0.0, self.seconds - self.cost.seconds(start, num_rows))
        return num_rows


class PrefillBudget:
    """Owns the allowance of prompts in each step, and what steps with prompts have taken so far."""

    def __init__(self, stretch: float, draft_length: DraftLengthController) -> None:
        self._stretch = stretch
        self._draft_length = draft_length
        self._cost = PromptCost()
        self._largest = _FIRST_ROWS / _GROWTH
        self._num_mixed = _MAX_MIXED_STEPS  # steps of streams and prompts since the last of streams alone
        self._has_plain = False

    def allowance(self, num_rows: int, num_streams: int) -> PromptAllowance:
        """For a step that has `num_rows` rows of its `num_streams` streams already; some streams may be held."""
        if num_streams == 0:
            return PromptAllowance(self._cost)
        if num_rows and self._num_mixed >= _MAX_MIXED_STEPS:
            return PromptAllowance(self._cost, 0, 0.0, 0)
        step_s = self._draft_length.step_s(max(num_rows, num_streams))
        extra_s = 0.0 if step_s is None else (self._stretch - 1.0) * step_s
        return PromptAllowance(self._cost, max(1.0, _GROWTH * self._largest), extra_s)

    def observe(self, scheduled: Iterable[ScheduledSequence], seconds: float) -> None:
        """A step of these rows took `seconds`. What streams alone take is known to the draft length controller."""
        items = tuple(scheduled)
        chunks = [item for item in items if is_chunk(item)]
        num_chunk_rows = sum(len(item.token_ids) for item in chunks)
        num_rows = sum(len(item.token_ids) for item in items) - num_chunk_rows
        if not chunks:
            self._num_mixed, self._has_plain = 0, True
            self._draft_length.observe_step(num_rows, seconds)
            return
        if not self._has_plain:  # the draft length needs some idea of a step
            self._draft_length.observe_step(num_rows + num_chunk_rows, seconds)
        elif num_rows and (plain_s := self._draft_length.step_s(num_rows)) is not None:
            self._learn(chunks, num_chunk_rows, seconds - plain_s)

    def _learn(self, chunks: Iterable[ScheduledSequence], num_rows: int, extra_s: float) -> None:
        self._num_mixed += 1
        self._largest = max(num_rows, _MEMORY * self._largest)
        self._cost.observe(num_rows, sum(num_pairs(item.start, len(item.token_ids)) for item in chunks), extra_s)


def is_chunk(item: ScheduledSequence) -> bool:
    """Whether these rows are of a prompt, or of what a preempted sequence computes again."""
    return item.start == 0 or len(item.token_ids) - item.num_draft_tokens > 1
