"""Token masks in machine code: -inf for every column whose token is not allowed."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cluster.runtime.kernels.compiling import native

Array = Any  # numba infers element types; shapes and types are in the docstrings

_FORBIDDEN = np.float32(-math.inf)


class Masks(NamedTuple):
    """TokenMasks; without any, every array is empty."""

    mask_of_row: Array  # int64 [R], -1 for a row without a mask
    words: Array  # uint32 [M, W]


NO_MASKS = Masks(np.zeros(0, np.int64), np.zeros((0, 0), np.uint32))


@native
def is_masked(masks: Masks, r: int) -> bool:
    return len(masks.mask_of_row) > 0 and masks.mask_of_row[r] >= 0


@native
def mask_row(logits: Array, ids: Array, masks: Masks, r: int) -> None:
    """Write -inf over what row r's mask does not allow. logits float32 [V]; ids int32 [V]."""
    words = masks.words[masks.mask_of_row[r]]
    for column in range(len(logits)):
        token_id = ids[column]
        is_allowed = token_id < 32 * len(words) and (words[token_id >> 5] >> np.uint32(token_id & 31)) & np.uint32(1)
        logits[column] = logits[column] if is_allowed else _FORBIDDEN
