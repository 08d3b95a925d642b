"""Matrix product of float32 activations with stored weights: y = (x W^T) * scales + bias + residual.

A task is a block of output columns for a block of rows. Within it the rows go in groups of at most six, the rows of a
tile:

    1 .. 6 rows     one group, so each weight is read from memory once and used for every row
    .. 18 rows      the groups take turns at each tile, while the next tile's weights are on their way from memory
    more rows       group by group, whose activations stay in the first-level cache while the block's weights pass by:
                    from memory for the first group, from the second-level cache for the others

A tile takes one column from each quarter of the block, so that the weights are four streams of which each goes on where
it stopped: a processor follows those at its full bandwidth, and loses half of it to streams that jump at every row.

Where products of pairs of bfloat16 are the fastest, activations are rounded to it for bfloat16 weights, as other
engines do everywhere; elsewhere they stay float32.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from cluster.runtime.kernels.compiling import Record, native, task_body
from cluster.runtime.kernels.dot_tiles import DOT_COLUMNS, DOT_ROWS, FULL_SPEED, arrange_row, arranged_bytes, dot_tile
from cluster.runtime.kernels.emit import LANES
from cluster.runtime.kernels.formats import BFLOAT16, BYTES_MASK
from cluster.runtime.kernels.simd import address_of, load, load_float, store, store_float
from cluster.runtime.kernels.team import launch

_LINEAR = np.dtype(
    [
        (name, np.int64)
        for name in (
            "x", "weight", "scales", "bias", "residual", "out",  # addresses; scales, bias and residual may be 0
            "num_rows", "num_columns", "depth", "x_stride", "stored",  # x_stride in bytes; stored: the weights' Format
            "rows_per_task", "rows_at_once", "columns_per_task", "column_blocks",
        )
    ]
)  # fmt: skip

_ROW_BLOCK = 96
_FEW_ROWS = 3 * DOT_ROWS  # that many rows take a tile's weights in turn as they come from memory
_BLOCK_BYTES = 192 * 1024  # weights of one task: fits the second-level cache beside the activations
_AHEAD_BYTES = 512  # to prefetch each of four streams of weights: the time that memory takes to answer
_TASKS_WANTED = 16  # cut finer than _BLOCK_BYTES if there would be fewer tasks than this


@native
def _stride(a: Record) -> int:
    """Bytes of the weights of one column of the result."""
    return a.depth * (a.stored & BYTES_MASK)  # type: ignore[no-any-return]


@native
def _tiles(a: Record, rows: int, x: int, x_stride: int, weights: int, columns: int, out: int) -> None:
    """All columns but the last few, which do not fill a tile."""
    stride, out_stride = _stride(a), a.num_columns * 4
    quarter, groups = columns // DOT_COLUMNS, -(-rows // DOT_ROWS)
    jump = quarter * stride
    ahead, share = (_AHEAD_BYTES, 0) if groups == 1 else (stride, -(-stride // groups))
    speed = -(-FULL_SPEED * (a.stored & BYTES_MASK) // groups)
    for column in range(quarter):
        w, done = weights + column * stride, 0
        for group in range(groups):
            count = -(-(rows - done) // (groups - group))  # as even as possible: 7 rows are 4 + 3, not 6 + 1
            dot_tile(
                a.stored, count, x + done * x_stride, x_stride,
                w, w + jump, w + 2 * jump, w + 3 * jump, a.depth,
                out + done * out_stride + column * 4, out_stride, quarter * 4, ahead + group * share, speed,
            )  # fmt: skip
            done += count


@native
def _last_columns(a: Record, rows: int, x: int, x_stride: int, weights: int, columns: int, out: int) -> None:
    """One to three columns: the same tile with the last one repeated, written through a scratch."""
    stride, scratch = _stride(a), np.empty((DOT_ROWS, DOT_COLUMNS), np.float32)
    last = weights + (columns - 1) * stride
    second, third = min(weights + stride, last), min(weights + 2 * stride, last)
    for first in range(0, rows, DOT_ROWS):
        count = min(rows - first, DOT_ROWS)
        dot_tile(
            a.stored, count, x + first * x_stride, x_stride, weights, second, third, last, a.depth,
            address_of(scratch), 4 * DOT_COLUMNS, 4, 0, 0,
        )  # fmt: skip
        for row in range(count):
            for column in range(columns):
                store_float(out + (first + row) * a.num_columns * 4 + 4 * column, scratch[row, column])


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


@native
def _complete(a: Record, row: int, column: int, columns: int) -> None:
    """Scales, bias and residual of one row, whose products are in `out`."""
    out = a.out + (row * a.num_columns + column) * 4
    if a.scales:
        _scale_row(out, a.scales + column * 4, columns)
    if a.bias:
        _add_row(out, a.bias + column * 4, columns)
    if a.residual:
        _add_row(out, a.residual + (row * a.num_columns + column) * 4, columns)


@task_body(_LINEAR)
def _linear_task(args: Record, task: int) -> None:
    a = carray(args, 1)[0]
    first_row, column = (task // a.column_blocks) * a.rows_per_task, (task % a.column_blocks) * a.columns_per_task
    row_end, columns = min(first_row + a.rows_per_task, a.num_rows), min(a.columns_per_task, a.num_columns - column)
    whole = columns & -DOT_COLUMNS
    weights = a.weight + column * _stride(a)
    arranged, arranged_stride = a.stored == BFLOAT16, arranged_bytes(a.depth)
    arrangement = np.empty(a.rows_at_once * arranged_stride if arranged else 0, np.uint8)
    for row in range(first_row, row_end, a.rows_at_once):
        rows, x, x_stride = min(a.rows_at_once, row_end - row), a.x + row * a.x_stride, a.x_stride
        out = a.out + (row * a.num_columns + column) * 4
        if arranged:
            for index in range(rows):
                arrange_row(x + index * x_stride, address_of(arrangement) + index * arranged_stride, a.depth)
            x, x_stride = address_of(arrangement), arranged_stride
        _tiles(a, rows, x, x_stride, weights, whole, out)
        if whole < columns:
            _last_columns(a, rows, x, x_stride, weights + whole * _stride(a), columns - whole, out + whole * 4)
        for index in range(row, row + rows):
            _complete(a, index, column, columns)


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
    a.rows_at_once = num_rows if num_rows <= _FEW_ROWS else DOT_ROWS
    launch(team, function, args, a.column_blocks * -(-num_rows // _ROW_BLOCK))


def linear_function() -> int:
    """The compiled task function's address, for launch_linear."""
    return _linear_task.address
