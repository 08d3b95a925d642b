"""Matrix product of float32 activations with stored weights: y = (x W^T) * scales + bias + residual.

A task is a block of output columns for a block of rows. Within it the rows go in groups of at most six, whose
activations stay in the first-level cache while the block's weights stream past:

    decode      1 .. 6 rows: one group, so each weight is read from memory once and used for every row
    prefill     many groups per block: each weight comes from memory once and from the cache for the other groups

A tile takes one column from each quarter of the block, so that the weights are four streams of which each goes on where
it stopped: a processor follows those at its full bandwidth, and loses half of it to streams that jump at every row.

Where the processor multiplies pairs of bfloat16, activations are rounded to it for bfloat16 weights, as other engines
do everywhere; elsewhere they stay float32.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from cluster.runtime.kernels.compiling import Record, native, task_body
from cluster.runtime.kernels.formats import BFLOAT16, BYTES_MASK, store_row
from cluster.runtime.kernels.simd import (
    LANES,
    MULTIPLIES_PAIRS,
    address_of,
    load,
    load_float,
    store,
    store_float,
)
from cluster.runtime.kernels.team import launch
from cluster.runtime.kernels.tiles import DOT_COLUMNS, DOT_ROWS, dot_tile

_LINEAR = np.dtype(
    [
        (name, np.int64)
        for name in (
            "x", "weight", "scales", "bias", "residual", "out",  # addresses; scales, bias and residual may be 0
            "num_rows", "num_columns", "depth", "x_stride", "stored",  # x_stride in bytes; stored: the weights' Format
            "rows_per_task", "columns_per_task", "column_blocks",
        )
    ]
)  # fmt: skip

_ROW_BLOCK = 96
_BLOCK_BYTES = 96 * 1024  # weights of one task: fits the second-level cache beside the activations
_AHEAD_BYTES = 512  # to prefetch each of four streams of weights: the time that memory takes to answer
_TASKS_WANTED = 16  # cut finer than _BLOCK_BYTES if there would be fewer tasks than this


@native
def _tail_tile(
    stored: int,
    paired: bool,
    rows: int,
    x: int,
    x_stride: int,
    first: int,
    stride: int,
    count: int,
    depth: int,
    out: int,
    out_stride: int,
) -> None:
    """The last `count` < 4 columns: the same tile with the last weight row repeated, written through a scratch."""
    last = first + (count - 1) * stride
    scratch = np.empty((DOT_ROWS, DOT_COLUMNS), np.float32)
    second, third = min(first + stride, last), min(first + 2 * stride, last)
    dot_tile(
        stored, paired, rows, x, x_stride, first, second, third, last, depth, address_of(scratch), 4 * DOT_COLUMNS, 4, 0
    )
    for row in range(rows):
        for column in range(count):
            store_float(out + row * out_stride + 4 * column, scratch[row, column])


@native
def _add_row(target: int, addend: int, count: int) -> None:
    for index in range(0, count & -LANES, LANES):
        store(target + 4 * index, load(target + 4 * index) + load(addend + 4 * index))
    for index in range(count & -LANES, count):
        store_float(target + 4 * index, load_float(target + 4 * index) + load_float(addend + 4 * index))


@native
def _scale_row(target: int, scales: int, count: int) -> None:
    for index in range(0, count & -LANES, LANES):
        store(target + 4 * index, load(target + 4 * index) * load(scales + 4 * index))
    for index in range(count & -LANES, count):
        store_float(target + 4 * index, load_float(target + 4 * index) * load_float(scales + 4 * index))


@task_body(_LINEAR)
def _linear_task(args: Record, task: int) -> None:
    a = carray(args, 1)[0]
    row, column = (task // a.column_blocks) * a.rows_per_task, (task % a.column_blocks) * a.columns_per_task
    row_end = min(row + a.rows_per_task, a.num_rows)
    column_end = min(column + a.columns_per_task, a.num_columns)
    paired = MULTIPLIES_PAIRS and a.stored == BFLOAT16
    rounded = np.empty(DOT_ROWS * a.depth if paired else 0, np.uint16)
    weight_stride, out_stride = a.depth * (a.stored & BYTES_MASK), a.num_columns * 4
    while row < row_end:
        # as even as possible: 7 rows are 4 + 3, not 6 + 1
        rows = -(-(row_end - row) // (-(-(row_end - row) // DOT_ROWS)))
        x, x_stride = a.x + row * a.x_stride, a.x_stride
        if paired:
            for index in range(rows):
                store_row(x + index * x_stride, address_of(rounded) + 2 * index * a.depth, a.depth, BFLOAT16)
            x, x_stride = address_of(rounded), 2 * a.depth
        quarter = (column_end - column) // DOT_COLUMNS
        jump = quarter * weight_stride
        for index in range(column, column + quarter):
            w, out = a.weight + index * weight_stride, a.out + row * out_stride + index * 4
            dot_tile(
                a.stored, paired, rows, x, x_stride, w, w + jump, w + 2 * jump, w + 3 * jump, a.depth,
                out, out_stride, quarter * 4, _AHEAD_BYTES,
            )  # fmt: skip
        first = column + quarter * DOT_COLUMNS
        if first < column_end:
            w, out = a.weight + first * weight_stride, a.out + row * out_stride + first * 4
            _tail_tile(
                a.stored, paired, rows, x, x_stride, w, weight_stride, column_end - first, a.depth, out, out_stride
            )
        for index in range(row, row + rows):
            out = a.out + index * out_stride + column * 4
            if a.scales:
                _scale_row(out, a.scales + column * 4, column_end - column)
            if a.bias:
                _add_row(out, a.bias + column * 4, column_end - column)
            if a.residual:
                _add_row(out, a.residual + index * out_stride + column * 4, column_end - column)
        row += rows


@native
def launch_linear(
    team: int,
    function: int,
    x: int,
    weight: int,
    scales: int,
    bias: int,
    residual: int,
    out: int,
    num_rows: int,
    num_columns: int,
    depth: int,
    x_stride: int,
    stored: int,
) -> None:
    """Compute y = (x W^T) * scales + bias + residual on the team.

    x float32 [num_rows, depth] with x_stride bytes between rows; weight [num_columns, depth], stored: its Format;
    scales and bias float32 [num_columns] or 0; residual float32 [num_rows, num_columns] or 0; out like residual, and no
    part of it may be x or residual.
    """
    args = np.empty(1, _LINEAR)
    a = args[0]
    a.x, a.weight, a.scales, a.bias, a.residual, a.out = x, weight, scales, bias, residual, out
    a.num_rows, a.num_columns, a.depth, a.x_stride, a.stored = num_rows, num_columns, depth, x_stride, stored
    columns = min(_BLOCK_BYTES // (depth * (stored & BYTES_MASK)), num_columns // _TASKS_WANTED)
    a.columns_per_task = max(DOT_COLUMNS, columns // DOT_COLUMNS * DOT_COLUMNS)
    a.column_blocks = -(-num_columns // a.columns_per_task)
    a.rows_per_task = _ROW_BLOCK
    launch(team, function, args, a.column_blocks * -(-num_rows // _ROW_BLOCK))


def linear_function() -> int:
    """The compiled task function's address, for launch_linear."""
    return _linear_task.address
