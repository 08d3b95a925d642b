"""The machine-code twin of cluster.core.sampling: the same tokens, without sorting a vocabulary.

One row at a time, so a row's token cannot depend on its neighbours. Among the tokens that the filters keep, the winner
has the largest x + noise. A token's noise costs two logarithms, but never exceeds -ln(1 - u), which the bits of the
float32 just below 1 - u bound in a few vector instructions. Only a token whose bound reaches the best score so far is
scored exactly: some tens in 49,152.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cluster.core.sampling import GREEDY_BELOW, WEIGHT_SCALE
from cluster.runtime.kernels.compiling import native
from cluster.runtime.kernels.logit_adjustments import Adjustments, adjust_row, is_adjusted
from cluster.runtime.kernels.sampling_filters import (
    BLOCK,
    FAULT_NONE,
    Array,
    Cut,
    Row,
    Scratch,
    block_may_hold,
    cut_top_k,
    cut_top_p,
    gather,
    is_kept,
    make_scratch,
    mass_of,
    scan,
    x_of,
)
from cluster.runtime.kernels.sampling_math import BOUND_OFFSET, MAX_GUMBEL, gumbel_of, noise_bound, output
from cluster.runtime.kernels.token_masks import Masks, is_masked, mask_row

_INF = math.inf


class Parameters(NamedTuple):
    """How each row is sampled: SamplingBatch's arrays, [R] each."""

    temperature: Array  # float64
    top_p: Array  # float64
    top_k: Array  # int64
    min_p: Array  # float64
    seed: Array  # uint64
    position: Array  # int64


class Changes(NamedTuple):
    """What changes in rows of logits before they are sampled, in this order."""

    adjustments: Adjustments
    masks: Masks


@native
def _may_win(row: Row, start: int, stop: int, best: np.float32) -> int:
    """Whether any token of a block can reach the score `best`, given minus BOUND_OFFSET."""
    top, scale, found = np.float32(row.top), np.float32(row.scale), 0
    for i in range(start, stop):
        bound = noise_bound(output(row.key, np.uint64(row.ids[i])))
        found |= (row.logits[i] - top) * scale + bound >= best
    return found


@native
def _race_block(row: Row, cut: Cut, block: int, best: float, winner: int) -> tuple[float, int]:
    """The better of (best, winner) and the block's own best kept token."""
    start, stop = block * BLOCK, min((block + 1) * BLOCK, len(row.logits))
    if not _may_win(row, start, stop, np.float32(best - BOUND_OFFSET)):
        return best, winner
    for i in range(start, stop):
        bits, x = output(row.key, np.uint64(row.ids[i])), x_of(row, row.logits[i])
        if x + noise_bound(bits) + BOUND_OFFSET < best or not is_kept(row, cut, i):
            continue
        score = x + gumbel_of(bits)
        if score > best or (score == best and row.ids[i] < row.ids[winner]):
            best, winner = score, i
    return best, winner


@native
def _race(row: Row, cut: Cut) -> int:
    """The column of the kept token with the largest x + noise."""
    best, winner = _race_block(row, cut, int(np.argmax(row.block_max)), -_INF, 0)  # a good start spares exact scores
    for block in range(len(row.block_max)):
        if block_may_hold(row, cut, block, max(cut.floor, best - MAX_GUMBEL)):
            best, winner = _race_block(row, cut, block, best, winner)
    return winner


@native
def _greedy(row: Row) -> int:
    """The column of the largest logit, lowest token id first."""
    winner = -1
    for block in range(len(row.block_max)):
        if row.block_max[block] == row.top:
            for i in range(block * BLOCK, min((block + 1) * BLOCK, len(row.logits))):
                if row.logits[i] == row.top and (winner < 0 or row.ids[i] < row.ids[winner]):
                    winner = i
    return winner


@native
def _draw(row: Row, scratch: Scratch, params: Parameters, r: int) -> int:
    min_p, top_k, top_p = params.min_p[r], params.top_k[r], params.top_p[r]
    cut = Cut(-_INF, -1, math.log(min_p) if min_p > 0 else -_INF)
    if top_k < len(row.logits):
        cut = cut_top_k(row, cut, scratch, top_k)
    if top_p < 1:
        cut = cut_top_p(row, cut, scratch, top_p)
    return _race(row, cut)


@native
def _changed(logits: Array, ids: Array, changes: Changes, r: int, copy: Array) -> Array:
    """Row r as it is to be sampled: itself, or changed in `copy`."""
    if is_adjusted(changes.adjustments, r):
        adjust_row(logits[r], changes.adjustments, r, copy)
    elif is_masked(changes.masks, r):
        copy[:] = logits[r]
    else:
        return logits[r]
    if is_masked(changes.masks, r):
        mask_row(copy, ids, changes.masks, r)
    return copy


@native
def sample_rows(logits: Array, ids: Array, params: Parameters, changes: Changes, columns: Array, faults: Array) -> None:
    """Write each row's sampled column, or a fault code.

    logits float32 [R, V]; ids int32 [V], the token id of each column; columns int64 [R]; faults uint8 [R].
    """
    scratch = make_scratch(logits.shape[1])
    any_change = len(changes.adjustments.row_start) + len(changes.masks.mask_of_row) > 0
    copy = np.empty(logits.shape[1] if any_change else 0, np.float32)
    for r in range(logits.shape[0]):
        row_logits = _changed(logits, ids, changes, r, copy)
        faults[r], top = scan(row_logits, scratch.block_max)
        if faults[r] != FAULT_NONE:
            continue
        is_greedy = params.temperature[r] < GREEDY_BELOW
        scale = 1.0 if is_greedy else 1.0 / params.temperature[r]
        key = output(params.seed[r], np.uint64(params.position[r]))
        row = Row(row_logits, ids, scratch.block_max, top, scale, key)
        columns[r] = _greedy(row) if is_greedy else _draw(row, scratch, params, r)


@native
def most_likely(logits: Array, ids: Array, num_top: int) -> tuple[float, float, Array]:
    """The largest logit, ln of the sum of e**(logit - largest), and the columns of the num_top largest, ascending.

    logits float32 [V] without a fault; ids int32 [V].
    """
    scratch = make_scratch(len(logits))
    _, top = scan(logits, scratch.block_max)
    row = Row(logits, ids, scratch.block_max, top, 1.0, np.uint64(0))
    everything = Cut(-_INF, -1, -_INF)
    log_total = math.log(mass_of(row, everything) / WEIGHT_SCALE)
    if num_top == 0:
        return top, log_total, scratch.columns[:0]
    count = gather(row, cut_top_k(row, everything, scratch, num_top), scratch.columns)
    return top, log_total, scratch.columns[:count]
