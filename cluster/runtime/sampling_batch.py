"""The sampling parameters of one step as arrays, one entry per sampled row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.runtime.logit_adjustments import LogitAdjustments
from cluster.runtime.token_masks import TokenMasks

_Scalar = TypeVar("_Scalar", bound=np.generic)

NO_TOP_K = int(np.iinfo(np.int64).max)  # more tokens than any vocabulary has: nothing is cut


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Holds how each of a step's R sampled rows becomes a token; rows of a sequence are contiguous, in order.

        rows        | sequence a: num_samples | sequence b: num_samples | ...
        position    absolute index of the token that the row samples (prompt included)

    Rows that want logprobs are listed apart, because few do: row `logprob_rows[i]` wants the chosen token's and those
    of the `num_logprobs[i]` most likely tokens.
    """

    temperature: NDArray[np.float64]  # [R], 0 is greedy
    top_p: NDArray[np.float64]  # [R], 1 cuts nothing
    top_k: NDArray[np.int64]  # [R], NO_TOP_K cuts nothing
    min_p: NDArray[np.float64]  # [R], 0 cuts nothing
    seed: NDArray[np.uint64]  # [R]
    position: NDArray[np.int64]  # [R]
    logprob_rows: NDArray[np.int64]  # [L], ascending
    num_logprobs: NDArray[np.int64]  # [L]
    adjustments: LogitAdjustments | None = None  # what changes in the rows' logits first
    masks: TokenMasks | None = None  # what may be chosen at all; applied after the adjustments

    @property
    def num_rows(self) -> int:
        return len(self.position)

    @classmethod
    def build(cls, step: SchedulerOutput) -> Self:
        """Arrays for every sequence of the step that samples; prefill chunks without samples add no row."""
        sampled = [item for item in step.scheduled if item.num_samples]
        params = [item.sampling for item in sampled]
        owner = [index for index, item in enumerate(sampled) for _ in range(item.num_samples)]  # of each row
        logprob_rows, num_logprobs = _logprob_rows(sampled)
        return cls(
            temperature=_rows([p.temperature for p in params], np.float64, owner),
            top_p=_rows([p.top_p for p in params], np.float64, owner),
            top_k=_rows([NO_TOP_K if p.top_k is None else p.top_k for p in params], np.int64, owner),
            min_p=_rows([p.min_p for p in params], np.float64, owner),
            seed=_rows([p.seed for p in params], np.uint64, owner),
            position=_positions(sampled),
            logprob_rows=logprob_rows,
            num_logprobs=num_logprobs,
            adjustments=LogitAdjustments.build(sampled),
            masks=TokenMasks.build(sampled),
        )


def _rows(values: Sequence[float], dtype: type[_Scalar], owner: Sequence[int]) -> NDArray[_Scalar]:
    """One value per sequence → one per row."""
    per_sequence = np.array(values, dtype=dtype)
    return per_sequence if len(owner) == len(values) else per_sequence[owner]


def _positions(sampled: list[ScheduledSequence]) -> NDArray[np.int64]:
    """The last num_samples token positions of each sequence, plus one: a row samples the token after its own."""
    ends = ((item.start + len(item.token_ids) + 1, item.num_samples) for item in sampled)
    return np.array([position for end, count in ends for position in range(end - count, end)], dtype=np.int64)


def _logprob_rows(sampled: list[ScheduledSequence]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rows: list[int] = []
    wanted: list[int] = []
    row = 0
    for item in sampled:
        if item.sampling.num_logprobs is not None:
            rows.extend(range(row, row + item.num_samples))
            wanted.extend([item.sampling.num_logprobs] * item.num_samples)
        row += item.num_samples
    return np.array(rows, dtype=np.int64), np.array(wanted, dtype=np.int64)
