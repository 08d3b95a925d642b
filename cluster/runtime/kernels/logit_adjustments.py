"""Penalties, biases and suppressed tokens in machine code: a few entries of a copied row."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cluster.runtime.kernels.compiling import native

Array = Any  # numba infers element types; shapes and types are in the docstrings


class Adjustments(NamedTuple):
    """LogitAdjustments with columns for token ids; without any, every array is empty."""

    row_start: Array  # int64 [R + 1]
    columns: Array  # int64 [E], -1 for a token that has none
    repetition: Array  # float64 [E]
    shift: Array  # float64 [E]


NO_ADJUSTMENTS = Adjustments(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))


@native
def is_adjusted(adjustments: Adjustments, r: int) -> bool:
    row_start = adjustments.row_start
    return len(row_start) > 0 and row_start[r] < row_start[r + 1]


@native
def adjust_row(logits: Array, adjustments: Adjustments, r: int, result: Array) -> None:
    """Write row r's adjusted logits to `result`; both float32 [V]."""
    result[:] = logits
    for entry in range(adjustments.row_start[r], adjustments.row_start[r + 1]):
        column = adjustments.columns[entry]
        if column >= 0:
            logit, repetition = np.float64(logits[column]), adjustments.repetition[entry]
            scaled = logit / repetition if logit > 0 else logit * repetition
            result[column] = np.float32(scaled + adjustments.shift[entry])
