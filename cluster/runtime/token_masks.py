"""Which of a step's rows are bound by a grammar, and the tokens that each may become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cluster.core.step import ScheduledSequence


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Holds the masks of a step's R sampled rows. A token whose id has no bit is not allowed."""

    mask_of_row: NDArray[np.int64]  # [R], index of the row's mask, -1 for a row without
    words: NDArray[np.uint32]  # [M, W]; bit i % 32 of word i // 32 is token i's

    @classmethod
    def build(cls, sampled: Sequence[ScheduledSequence]) -> Self | None:
        """Of the sequences that sample, in order; None when every row may become anything."""
        if all(item.token_masks is None for item in sampled):
            return None
        bound = np.repeat([item.token_masks is not None for item in sampled], [item.num_samples for item in sampled])
        bits = bytearray().join(item.token_masks for item in sampled if item.token_masks is not None)
        words = np.frombuffer(bits, np.dtype("<u4")).reshape(int(bound.sum()), -1)
        return cls(np.where(bound, np.cumsum(bound) - 1, -1), words)
