"""The machine-code twin of cluster.core.sampling: the same tokens, without sorting a vocabulary.

One row at a time, so a row's token cannot depend on its neighbours. The row is cut into blocks of 64 columns:

    columns     | block 0: 0 .. 63 | block 1: 64 .. 127 | ... | last block, maybe shorter |
    block_max   largest logit of each block: later passes skip a block that holds nothing they look for

Every filter keeps a leading part of the tokens ranked by (logit, lowest id first), so what is kept is described by its
last token, a `Cut`. Finding it needs no order among the others: top_k and top_p gather the few candidates near the
top and select the last kept one by radix over the bits of their logits.

Among the kept tokens, the winner has the largest x + noise. A token's noise costs two logarithms, but never exceeds
-ln(1 - u), which the bits of the float32 just below 1 - u bound in a few vector instructions. Only a token whose bound
reaches the best score so far is scored exactly: some tens in 49,152.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cluster.core.sampling import GREEDY_BELOW, WEIGHT_SCALE
from cluster.runtime.sampling_math import (
    BOUND_OFFSET,
    INFINITY_BITS,
    LOWEST_X,
    MAX_GUMBEL,
    compiled,
    float_of,
    gumbel_of,
    magnitude_bits,
    noise_bound,
    ordered,
    output,
    weight_of,
)

Array = Any  # numba infers element types; shapes and types are in the docstrings

BLOCK = 64

FAULT_NONE, FAULT_NAN, FAULT_INFINITE, FAULT_EMPTY = 0, 1, 2, 3

_INF = math.inf
_ALL_IDS = 2**31  # more than any token id


class Row(NamedTuple):
    """One row of logits and what is needed to score its tokens."""

    logits: Array  # float32 [V]
    ids: Array  # int32 [V], token id of each column
    block_max: Array  # float32 [ceil(V / BLOCK)]
    top: float  # largest logit, finite
    scale: float  # 1 / temperature
    key: np.uint64  # row key of the noise


class Cut(NamedTuple):
    """The last token that the filters keep: a token is kept from this logit and, among equals, up to this id on.

    `floor` is min_p's bound, on x. A logit of -inf is never to be kept: (-inf, -1) keeps all others.
    """

    logit: float
    token_id: int
    floor: float


class Parameters(NamedTuple):
    """How each row is sampled: SamplingBatch's arrays, [R] each."""

    temperature: Array  # float64
    top_p: Array  # float64
    top_k: Array  # int64
    min_p: Array  # float64
    seed: Array  # uint64
    position: Array  # int64


class Scratch(NamedTuple):
    """Work space for one row at a time."""

    block_max: Array  # float32 [ceil(V / BLOCK)]
    columns: Array  # int32 [V], candidates of a selection
    weights: Array  # int64 [V], of those candidates
    bins: Array  # int64 [256]


# --- passes over a row -----------------------------------------------------------------------------------------------


@compiled
def _scan_block(logits: Array, start: int, stop: int) -> tuple[np.int32, np.int32]:
    """The largest of a block's logits, as an ordered integer, and of their magnitudes, as bits."""
    largest, widest = np.int32(-(2**31)), np.int32(0)
    for i in range(start, stop):
        largest = max(largest, ordered(logits[i]))
        widest = max(widest, magnitude_bits(logits[i]))
    return largest, widest


@compiled
def _scan(logits: Array, block_max: Array) -> tuple[int, float]:
    """Fill block_max; return a fault code and the largest logit."""
    largest, widest = np.int32(-(2**31)), np.int32(0)
    for block in range(len(block_max)):
        in_block, width = _scan_block(logits, block * BLOCK, min((block + 1) * BLOCK, len(logits)))
        block_max[block] = float_of(in_block)
        largest, widest = max(largest, in_block), max(widest, width)
    top = np.float64(float_of(largest))
    if widest > INFINITY_BITS:
        return FAULT_NAN, top
    if top == _INF:
        return FAULT_INFINITE, top
    return (FAULT_EMPTY if top == -_INF else FAULT_NONE), top


@compiled
def _x(row: Row, logit: np.float32) -> float:
    return float((np.float64(logit) - row.top) * row.scale)


@compiled
def _is_kept(row: Row, cut: Cut, column: int) -> bool:
    logit = row.logits[column]
    ranked = (logit > cut.logit) | ((logit == cut.logit) & (row.ids[column] <= cut.token_id))
    return bool(ranked & (_x(row, logit) >= cut.floor))


@compiled
def _mass_of_block(row: Row, cut: Cut, start: int, stop: int) -> int:
    mass = 0
    for i in range(start, stop):
        weight = weight_of(_x(row, row.logits[i]))
        mass += weight if _is_kept(row, cut, i) else 0
    return mass


@compiled
def _mass(row: Row, cut: Cut) -> int:
    """The total weight of the kept tokens."""
    mass = 0
    for block in range(len(row.block_max)):
        if _block_may_hold(row, cut, block, max(cut.floor, LOWEST_X)):
            mass += _mass_of_block(row, cut, block * BLOCK, min((block + 1) * BLOCK, len(row.logits)))
    return mass


@compiled
def _block_may_hold(row: Row, cut: Cut, block: int, floor: float) -> bool:
    return bool(row.block_max[block] >= cut.logit) and _x(row, row.block_max[block]) >= floor


@compiled
def _gather(row: Row, cut: Cut, columns: Array) -> int:
    """Write the kept tokens' columns, ascending; return how many."""
    count = 0
    for block in range(len(row.block_max)):
        if _block_may_hold(row, cut, block, cut.floor):
            for i in range(block * BLOCK, min((block + 1) * BLOCK, len(row.logits))):
                columns[count] = i
                count += _is_kept(row, cut, i)
    return count


# --- filters ---------------------------------------------------------------------------------------------------------


@compiled
def _digit(logit: np.float32, shift: int) -> int:
    return int(((np.int64(ordered(logit)) + 2**31) >> shift) & 255)


@compiled
def _last_needed(logits: Array, columns: Array, weights: Array, bins: Array, needed: float) -> tuple[int, int]:
    """Rank columns by logit, most likely first, and take from the front until their weights reach `needed`.

    Moves the columns whose logit equals the last one's to the front of `columns`; returns how many those are and how
    many of them are needed. needed must be above 0 and at most the weights' sum. One pass per byte of a logit.
    """
    count, reached = len(columns), 0
    for shift in (24, 16, 8, 0):
        bins[:] = 0
        for i in range(count):
            bins[_digit(logits[columns[i]], shift)] += weights[i]
        digit = 255
        while digit > 0 and reached + bins[digit] < needed:
            reached += bins[digit]
            digit -= 1
        left = 0
        for i in range(count):
            column, weight = columns[i], weights[i]
            if _digit(logits[column], shift) == digit:
                columns[left], weights[left] = column, weight
                left += 1
        count = left
    kept = max(1, int((needed - reached) / weights[0]))
    return count, kept + (reached + kept * weights[0] < needed)


@compiled
def _cut_after(row: Row, cut: Cut, scratch: Scratch, count: int, needed: float) -> Cut:
    """Cut where the weights of the first `count` candidates in scratch reach `needed`."""
    columns = scratch.columns[:count]
    equal, kept = _last_needed(row.logits, columns, scratch.weights[:count], scratch.bins, needed)
    ids = np.empty(equal, np.int64)
    for i in range(equal):
        ids[i] = row.ids[columns[i]]
    ids.sort()
    return Cut(np.float64(row.logits[columns[0]]), ids[kept - 1], cut.floor)


@compiled
def _top_k_bound(row: Row, scratch: Scratch, k: int) -> float:
    """A logit that at least k tokens reach: the k-th largest block has it as its largest."""
    blocks = len(row.block_max)
    if k >= blocks:
        return -_INF
    for block in range(blocks):
        scratch.columns[block] = block
        scratch.weights[block] = 1
    _last_needed(row.block_max, scratch.columns[:blocks], scratch.weights[:blocks], scratch.bins, float(k))
    return np.float64(row.block_max[scratch.columns[0]])


@compiled
def cut_top_k(row: Row, cut: Cut, scratch: Scratch, k: int) -> Cut:
    """Keep the k first of what `cut` keeps; `cut` itself holds no more than min_p's floor."""
    bound = _top_k_bound(row, scratch, k)
    above = Cut(bound, _ALL_IDS if bound > -_INF else -1, cut.floor)
    count = _gather(row, above, scratch.columns)
    if count <= k:  # fewer than k only where the floor cuts higher than the bound
        return above
    scratch.weights[:count] = 1
    return _cut_after(row, cut, scratch, count, float(k))


@compiled
def _gather_weights(row: Row, scratch: Scratch, count: int) -> int:
    mass = 0
    for i in range(count):
        weight = weight_of(_x(row, row.logits[scratch.columns[i]]))
        scratch.weights[i] = weight
        mass += weight
    return mass


@compiled
def cut_top_p(row: Row, cut: Cut, scratch: Scratch, top_p: float) -> Cut:
    """Keep the shortest leading part of what `cut` keeps whose weight reaches top_p of the whole."""
    needed = max(top_p * _mass(row, cut), 0.5)  # above 0, and below any weight that counts
    reach = 4.0  # how far below the top to look, in x; doubled until it suffices, which LOWEST_X always does
    while True:
        count = _gather(row, Cut(cut.logit, cut.token_id, max(cut.floor, -reach)), scratch.columns)
        if _gather_weights(row, scratch, count) >= needed:
            return _cut_after(row, cut, scratch, count, needed)
        reach *= 2


# --- the choice ------------------------------------------------------------------------------------------------------


@compiled
def _may_win(row: Row, start: int, stop: int, best: np.float32) -> int:
    """Whether any token of a block can reach the score `best`, given minus BOUND_OFFSET."""
    top, scale, found = np.float32(row.top), np.float32(row.scale), 0
    for i in range(start, stop):
        bound = noise_bound(output(row.key, np.uint64(row.ids[i])))
        found |= (row.logits[i] - top) * scale + bound >= best
    return found


@compiled
def _race_block(row: Row, cut: Cut, block: int, best: float, winner: int) -> tuple[float, int]:
    """The better of (best, winner) and the block's own best kept token."""
    start, stop = block * BLOCK, min((block + 1) * BLOCK, len(row.logits))
    if not _may_win(row, start, stop, np.float32(best - BOUND_OFFSET)):
        return best, winner
    for i in range(start, stop):
        bits, x = output(row.key, np.uint64(row.ids[i])), _x(row, row.logits[i])
        if x + noise_bound(bits) + BOUND_OFFSET < best or not _is_kept(row, cut, i):
            continue
        score = x + gumbel_of(bits)
        if score > best or (score == best and row.ids[i] < row.ids[winner]):
            best, winner = score, i
    return best, winner


@compiled
def _race(row: Row, cut: Cut) -> int:
    """The column of the kept token with the largest x + noise."""
    best, winner = _race_block(row, cut, int(np.argmax(row.block_max)), -_INF, 0)  # a good start spares exact scores
    for block in range(len(row.block_max)):
        if _block_may_hold(row, cut, block, max(cut.floor, best - MAX_GUMBEL)):
            best, winner = _race_block(row, cut, block, best, winner)
    return winner


@compiled
def _greedy(row: Row) -> int:
    """The column of the largest logit, lowest token id first."""
    winner = -1
    for block in range(len(row.block_max)):
        if row.block_max[block] == row.top:
            for i in range(block * BLOCK, min((block + 1) * BLOCK, len(row.logits))):
                if row.logits[i] == row.top and (winner < 0 or row.ids[i] < row.ids[winner]):
                    winner = i
    return winner


@compiled
def _draw(row: Row, scratch: Scratch, params: Parameters, r: int) -> int:
    min_p, top_k, top_p = params.min_p[r], params.top_k[r], params.top_p[r]
    cut = Cut(-_INF, -1, math.log(min_p) if min_p > 0 else -_INF)
    if top_k < len(row.logits):
        cut = cut_top_k(row, cut, scratch, top_k)
    if top_p < 1:
        cut = cut_top_p(row, cut, scratch, top_p)
    return _race(row, cut)


@compiled
def _make_scratch(vocab_size: int) -> Scratch:
    return Scratch(
        np.empty((vocab_size + BLOCK - 1) // BLOCK, np.float32),
        np.empty(vocab_size, np.int32),
        np.empty(vocab_size, np.int64),
        np.empty(256, np.int64),
    )


@compiled
def sample_rows(logits: Array, ids: Array, params: Parameters, columns: Array, faults: Array) -> None:
    """Write each row's sampled column, or a fault code.

    logits float32 [R, V]; ids int32 [V], the token id of each column; columns int64 [R]; faults uint8 [R].
    """
    scratch = _make_scratch(logits.shape[1])
    for r in range(logits.shape[0]):
        faults[r], top = _scan(logits[r], scratch.block_max)
        if faults[r] != FAULT_NONE:
            continue
        is_greedy = params.temperature[r] < GREEDY_BELOW
        scale = 1.0 if is_greedy else 1.0 / params.temperature[r]
        key = output(params.seed[r], np.uint64(params.position[r]))
        row = Row(logits[r], ids, scratch.block_max, top, scale, key)
        columns[r] = _greedy(row) if is_greedy else _draw(row, scratch, params, r)


@compiled
def most_likely(logits: Array, ids: Array, num_top: int) -> tuple[float, float, Array]:
    """The largest logit, ln of the sum of e**(logit - largest), and the columns of the num_top largest, ascending.

    logits float32 [V] without a fault; ids int32 [V].
    """
    scratch = _make_scratch(len(logits))
    _, top = _scan(logits, scratch.block_max)
    row = Row(logits, ids, scratch.block_max, top, 1.0, np.uint64(0))
    everything = Cut(-_INF, -1, -_INF)
    log_total = math.log(_mass(row, everything) / WEIGHT_SCALE)
    if num_top == 0:
        return top, log_total, scratch.columns[:0]
    count = _gather(row, cut_top_k(row, everything, scratch, num_top), scratch.columns)
    return top, log_total, scratch.columns[:count]
