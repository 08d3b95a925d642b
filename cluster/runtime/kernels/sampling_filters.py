"""A row of logits in machine code: passes over its blocks, and what min_p, top_k and top_p leave of it.

The row is cut into blocks of 64 columns:

    columns     | block 0: 0 .. 63 | block 1: 64 .. 127 | ... | last block, maybe shorter |
    block_max   largest logit of each block: later passes skip a block that holds nothing they look for

Every filter keeps a leading part of the tokens ranked by (logit, lowest id first), so what is kept is described by its
last token, a `Cut`. Finding it needs no order among the others: top_k and top_p gather the few candidates near the
top and select the last kept one by radix over the bits of their logits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cluster.runtime.kernels.compiling import native
from cluster.runtime.kernels.sampling_math import (
    INFINITY_BITS,
    LOWEST_X,
    float_of,
    magnitude_bits,
    ordered,
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


class Scratch(NamedTuple):
    """Work space for one row at a time."""

    block_max: Array  # float32 [ceil(V / BLOCK)]
    columns: Array  # int32 [V], candidates of a selection
    weights: Array  # int64 [V], of those candidates
    bins: Array  # int64 [256]


@native
def make_scratch(vocab_size: int) -> Scratch:
    return Scratch(
        np.empty((vocab_size + BLOCK - 1) // BLOCK, np.float32),
        np.empty(vocab_size, np.int32),
        np.empty(vocab_size, np.int64),
        np.empty(256, np.int64),
    )


# --- passes over a row -----------------------------------------------------------------------------------------------


@native
def _scan_block(logits: Array, start: int, stop: int) -> tuple[np.int32, np.int32]:
    """The largest of a block's logits, as an ordered integer, and of their magnitudes, as bits."""
    largest, widest = np.int32(-(2**31)), np.int32(0)
    for i in range(start, stop):
        largest = max(largest, ordered(logits[i]))
        widest = max(widest, magnitude_bits(logits[i]))
    return largest, widest


@native
def scan(logits: Array, block_max: Array) -> tuple[int, float]:
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


@native
def x_of(row: Row, logit: np.float32) -> float:
    return float((np.float64(logit) - row.top) * row.scale)


@native
def is_kept(row: Row, cut: Cut, column: int) -> bool:
    logit = row.logits[column]
    ranked = (logit > cut.logit) | ((logit == cut.logit) & (row.ids[column] <= cut.token_id))
    return bool(ranked & (x_of(row, logit) >= cut.floor))


@native
def _mass_of_block(row: Row, cut: Cut, start: int, stop: int) -> int:
    mass = 0
    for i in range(start, stop):
        weight = weight_of(x_of(row, row.logits[i]))
        mass += weight if is_kept(row, cut, i) else 0
    return mass


@native
def mass_of(row: Row, cut: Cut) -> int:
    """The total weight of the kept tokens."""
    mass = 0
    for block in range(len(row.block_max)):
        if block_may_hold(row, cut, block, max(cut.floor, LOWEST_X)):
            mass += _mass_of_block(row, cut, block * BLOCK, min((block + 1) * BLOCK, len(row.logits)))
    return mass


@native
def block_may_hold(row: Row, cut: Cut, block: int, floor: float) -> bool:
    return bool(row.block_max[block] >= cut.logit) and x_of(row, row.block_max[block]) >= floor


@native
def gather(row: Row, cut: Cut, columns: Array) -> int:
    """Write the kept tokens' columns, ascending; return how many."""
    count = 0
    for block in range(len(row.block_max)):
        if block_may_hold(row, cut, block, cut.floor):
            for i in range(block * BLOCK, min((block + 1) * BLOCK, len(row.logits))):
                columns[count] = i
                count += is_kept(row, cut, i)
    return count


# --- filters ---------------------------------------------------------------------------------------------------------


@native
def _digit(logit: np.float32, shift: int) -> int:
    return int(((np.int64(ordered(logit)) + 2**31) >> shift) & 255)


@native
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


@native
def _cut_after(row: Row, cut: Cut, scratch: Scratch, count: int, needed: float) -> Cut:
    """Cut where the weights of the first `count` candidates in scratch reach `needed`."""
    columns = scratch.columns[:count]
    equal, kept = _last_needed(row.logits, columns, scratch.weights[:count], scratch.bins, needed)
    ids = np.empty(equal, np.int64)
    for i in range(equal):
        ids[i] = row.ids[columns[i]]
    ids.sort()
    return Cut(np.float64(row.logits[columns[0]]), ids[kept - 1], cut.floor)


@native
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


@native
def cut_top_k(row: Row, cut: Cut, scratch: Scratch, k: int) -> Cut:
    """Keep the k first of what `cut` keeps; `cut` itself holds no more than min_p's floor."""
    bound = _top_k_bound(row, scratch, k)
    above = Cut(bound, _ALL_IDS if bound > -_INF else -1, cut.floor)
    count = gather(row, above, scratch.columns)
    if count <= k:  # fewer than k only where the floor cuts higher than the bound
        return above
    scratch.weights[:count] = 1
    return _cut_after(row, cut, scratch, count, float(k))


@native
def _gather_weights(row: Row, scratch: Scratch, count: int) -> int:
    mass = 0
    for i in range(count):
        weight = weight_of(x_of(row, row.logits[scratch.columns[i]]))
        scratch.weights[i] = weight
        mass += weight
    return mass


@native
def cut_top_p(row: Row, cut: Cut, scratch: Scratch, top_p: float) -> Cut:
    """Keep the shortest leading part of what `cut` keeps whose weight reaches top_p of the whole."""
    needed = max(top_p * mass_of(row, cut), 0.5)  # above 0, and below any weight that counts
    reach = 4.0  # how far below the top to look, in x; doubled until it suffices, which LOWEST_X always does
    while True:
        count = gather(row, Cut(cut.logit, cut.token_id, max(cut.floor, -reach)), scratch.columns)
        if _gather_weights(row, scratch, count) >= needed:
            return _cut_after(row, cut, scratch, count, needed)
        reach *= 2
