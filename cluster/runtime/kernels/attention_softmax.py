"""Scores of one row over a span of keys, turned into softmax weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.runtime.kernels.compiling import native
from cluster.runtime.kernels.emit import LANES
from cluster.runtime.kernels.simd import address_of, broadcast, exp, lane_max, lane_sum, load, maximum, store


@native
def _capped(score: Any, cap: Any) -> Any:
    """cap * tanh(score / cap), within 1.2e-7 * cap."""
    one = broadcast(np.float32(1))
    twice = score / cap + score / cap
    return cap * (one - (one + one) / (one + exp(twice)))


@native
def softmax(
    scores: NDArray[np.float32], first: int, count: int, scale: np.float32, softcap: np.float32
) -> tuple[np.float32, np.float32]:
    """Replace scores[first:count] by exp(score * scale - largest) and those before by 0; gives the largest and the sum.

    softcap c > 0 makes c * tanh(score * scale / c) of the scaled score first. The memory of `scores` is read and
    written up to the next multiple of LANES. Without any key the result is (-inf, 0).
    """
    base, whole = address_of(scores), -(-count // LANES) * LANES
    factor, top = broadcast(scale), broadcast(np.float32(-np.inf))
    if first >= count:
        scores[:whole] = 0
        return np.float32(-np.inf), np.float32(0)
    if softcap > 0:
        for index in range(0, whole, LANES):
            store(base + 4 * index, _capped(load(base + 4 * index) * factor, broadcast(softcap)))
        factor = broadcast(np.float32(1))
    scores[:first] = -np.inf
    scores[count:whole] = -np.inf
    for index in range(0, whole, LANES):
        score = load(base + 4 * index) * factor
        store(base + 4 * index, score)
        top = maximum(top, score)
    largest, total = lane_max(top), broadcast(np.float32(0))
    for index in range(0, whole, LANES):
        weight = exp(load(base + 4 * index) - broadcast(largest))
        store(base + 4 * index, weight)
        total = total + weight
    return largest, lane_sum(total)
