"""What a step's parameters change in its rows of logits, as flat arrays that every sampler applies alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from cluster.core.step import SamplingHistory, ScheduledSequence

Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LogitAdjustments:
    """Holds which tokens' logits change in which of a step's R sampled rows, and how: cluster.core.sampling.adjusted.

        entries     | row 0: row_start[0] .. row_start[1] | row 1 ... |
        logit'      float32((logit / repetition if logit > 0 else logit * repetition) + shift)

    A token has at most one entry in a row. A row without entries is sampled as it is.
    """

    row_start: Int64Array  # [R + 1]
    token_ids: Int64Array  # [E]
    repetition: Float64Array  # [E], 1 for a token that has not been seen
    shift: Float64Array  # [E], bias minus penalties; -inf for a token that must not be chosen

    @classmethod
    def build(cls, sampled: Sequence[ScheduledSequence]) -> Self | None:
        """Of the sequences that sample, in order; None when no row changes."""
        if all(item.history is None for item in sampled):
            return None
        parts = [_entries(item, item.history) for item in sampled if item.history is not None]
        sizes = [0 if item.history is None else len(item.history.token_ids) // 4 for item in sampled]
        row_sizes = np.repeat(np.array(sizes, np.int64), [item.num_samples for item in sampled])
        return cls(
            row_start=np.concatenate((np.zeros(1, np.int64), np.cumsum(row_sizes))),
            token_ids=np.concatenate([part.token_ids for part in parts]),
            repetition=np.concatenate([part.repetition for part in parts]),
            shift=np.concatenate([part.shift for part in parts]),
        )


class _Entries(NamedTuple):
    """A sequence's entries, row after row."""

    token_ids: Int64Array
    repetition: Float64Array
    shift: Float64Array


def _entries(item: ScheduledSequence, history: SamplingHistory) -> _Entries:
    params, num_rows = item.sampling, item.num_samples
    counts = _counts(history, num_rows)  # [num_rows, E]
    times = np.maximum(counts, 0)
    repetition = np.where(counts == SamplingHistory.NOT_SEEN, 1.0, params.repetition_penalty)
    bias = np.zeros(counts.shape[1])
    given = np.frombuffer(history.bias, np.float64)
    bias[: len(given)] = given
    shift = bias - (params.frequency_penalty * times + params.presence_penalty * (times > 0))
    num_short = params.min_tokens - (history.num_output_tokens + history.num_ahead - (num_rows - 1))
    shift[: max(0, num_short), list(history.stop_slots)] = -np.inf
    token_ids = np.tile(np.frombuffer(history.token_ids, np.int32).astype(np.int64), num_rows)
    return _Entries(token_ids, repetition.ravel(), shift.ravel())


def _counts(history: SamplingHistory, num_rows: int) -> NDArray[np.int32]:
    """Each row's counts: those of what is committed, and the tokens ahead that come before the row's sample."""
    counts = np.tile(np.frombuffer(history.counts, np.int32), (num_rows, 1))
    num_before_all = history.num_ahead - (num_rows - 1)
    for index, slot in enumerate(history.ahead_slots):
        after = counts[max(0, index + 1 - num_before_all) :, slot]
        after[:] = np.maximum(after, 0) + 1
    return counts


def columns_of(token_ids: Int64Array, ids: NDArray[np.integer[Any]]) -> Int64Array:
    """The column of each token, -1 for one that is not scored. `ids`: the distinct token id of each column."""
    column_of = np.full(1 + max(int(ids.max()), int(token_ids.max(initial=0))), -1, np.int64)
    column_of[ids] = np.arange(len(ids))
    return column_of[token_ids]
