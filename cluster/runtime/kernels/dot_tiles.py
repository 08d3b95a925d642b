"""The inner loop of matrix products, a block of accumulators that never leaves the registers.

    dot tile          out[row, 0..3] = sum_k x[row, k] * w_j[k]       up to 6 rows x 4 vectors w_0 .. w_3

Order of additions, the same for every tile shape: lane i adds x[k] * w[k] for k = i, i + 16, ... in turn, fused; with
halves and pairs for k = 2i, 2i + 1, then those 32 further on, and so on (pairs: 2i + 1 before 2i). Then the lanes are
added by the tree of emit_sums. So a row's result does not depend on the tile it was in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cluster.runtime.kernels.compiling import native
from cluster.runtime.kernels.emit import (
    F32,
    I64,
    LANES,
    MULTIPLIES_PAIRS,
    PAIRS,
    V16F32,
    emit_add_products,
    emit_fma,
    emit_halves,
    emit_load,
    emit_load_part,
    emit_pairs,
    emit_prefetch,
    emit_store,
    emit_sums,
    for_each_count,
    pointer,
    shuffle,
    splat,
    stack_slot,
)
from cluster.runtime.kernels.formats import BFLOAT16, FLOAT16, INT8, Format, emit_load_as, emit_load_part_as, store_row
from cluster.runtime.kernels.simd import float32x16, load, load_part, operation3

DOT_ROWS = 6  # most rows of a dot tile: 6 x 4 accumulators + 4 weights + 1 activation of 32 registers
DOT_COLUMNS = 4
FULL_SPEED = 64  # of prefetching: as many bytes as are taken up


def _const(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


@dataclass(frozen=True, slots=True)
class _Factors:
    """How a dot tile takes up activations and weights, `count` of each at a time, in vectors that it multiplies."""

    count: int
    activation_bytes: int
    weights: Callable[[ir.IRBuilder, Format, ir.Value, ir.Value | None], Sequence[ir.Value]]  # one or more vectors
    activation: Callable[[ir.IRBuilder, ir.Value, int, ir.Value | None], ir.Value]  # that goes with the n-th of them
    add_product: Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]  # of activation, weight, sum


def _widened(builder: ir.IRBuilder, stored: Format, address: ir.Value, count: ir.Value | None) -> Sequence[ir.Value]:
    if count is None:
        return [emit_load_as(builder, stored, address)]
    return [emit_load_part_as(builder, stored, address, count)]


def _floats(builder: ir.IRBuilder, address: ir.Value, _: int, count: ir.Value | None) -> ir.Value:
    return emit_load(builder, address) if count is None else emit_load_part(builder, address, count)


def _halves(builder: ir.IRBuilder, _: Format, address: ir.Value, count: ir.Value | None) -> Sequence[ir.Value]:
    return emit_halves(builder, emit_pairs(builder, address, count))


def _half_floats(builder: ir.IRBuilder, address: ir.Value, half: int, _: ir.Value | None) -> ir.Value:
    return emit_load(builder, builder.add(address, _const(4 * LANES * half)))  # zeros follow a row's end


def _pairs(builder: ir.IRBuilder, _: Format, address: ir.Value, count: ir.Value | None) -> Sequence[ir.Value]:
    return [emit_pairs(builder, address, count)]


def _pair(builder: ir.IRBuilder, address: ir.Value, _: int, count: ir.Value | None) -> ir.Value:
    return emit_pairs(builder, address, count)


_WIDENED = _Factors(LANES, 4, _widened, _floats, emit_fma)
_HALVED = _Factors(PAIRS, 4, _halves, _half_floats, emit_fma)
_PAIRED = _Factors(PAIRS, 2, _pairs, _pair, emit_add_products)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What to prefetch of each column.

    From `start` bytes past its first element on, speed / FULL_SPEED bytes per element.
    """

    start: ir.Value
    speed: ir.Value


class _DotTile:
    """Writes the code of one dot tile of a fixed number of rows."""

    def __init__(self, builder: ir.IRBuilder, num_rows: int, stored: Format, factors: _Factors) -> None:
        self._builder = builder
        self._stored = stored
        self._factors = factors
        self._sums = [[stack_slot(builder, V16F32) for _ in range(DOT_COLUMNS)] for _ in range(num_rows)]

    def emit(
        self, x: ir.Value, x_stride: ir.Value, columns: Sequence[ir.Value], depth: ir.Value, ahead: _Ahead
    ) -> list[ir.Value]:
        """x: address of row 0; x_stride: bytes between rows; columns: addresses of w_j; the sums, row by row."""
        builder = self._builder
        rows = [builder.add(x, builder.mul(x_stride, _const(row))) for row in range(len(self._sums))]
        self._multiply(rows, columns, depth, ahead)
        return emit_sums(builder, [builder.load(place) for places in self._sums for place in places])

    def _multiply(self, rows: list[ir.Value], columns: Sequence[ir.Value], depth: ir.Value, ahead: _Ahead) -> None:
        """Leave the products of every row and column in _sums, lane by lane."""
        builder = self._builder
        for place in (place for row in self._sums for place in row):
            builder.store(splat(0.0), place)
        step = self._factors.count
        whole = builder.and_(depth, _const(-step))
        with cgutils.for_range_slice(builder, _const(0), whole, _const(step), I64) as (k, _):
            offset = builder.add(
                ahead.start, builder.ashr(builder.mul(k, ahead.speed), _const(FULL_SPEED.bit_length() - 1))
            )
            for column in columns:
                emit_prefetch(builder, builder.add(column, offset))
            self._add(k, rows, columns, None)
        rest = builder.sub(depth, whole)
        with builder.if_then(builder.icmp_signed("!=", rest, _const(0)), likely=False):
            self._add(whole, rows, columns, rest)

    def _add(self, k: ir.Value, rows: list[ir.Value], columns: Sequence[ir.Value], count: ir.Value | None) -> None:
        builder, factors = self._builder, self._factors
        weights = [
            factors.weights(builder, self._stored, self._at(column, k, self._stored.num_bytes), count)
            for column in columns
        ]
        for part in range(len(weights[0])):
            for row, places in zip(rows, self._sums, strict=True):
                activation = factors.activation(builder, self._at(row, k, factors.activation_bytes), part, count)
                for weight, place in zip(weights, places, strict=True):
                    builder.store(factors.add_product(builder, activation, weight[part], builder.load(place)), place)

    def _at(self, base: ir.Value, k: ir.Value, num_bytes: int) -> ir.Value:
        return self._builder.add(base, self._builder.mul(k, _const(num_bytes)))


def _dot_tile(stored: Format, factors: _Factors = _WIDENED) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, _: Any, values: Sequence[ir.Value]) -> ir.Value:
        num_rows, x, x_stride, *columns, depth, out, out_stride, out_step, ahead, speed = values

        def emit(rows: int) -> None:
            sums = iter(
                _DotTile(builder, rows, stored, factors).emit(x, x_stride, columns, depth, _Ahead(ahead, speed))
            )
            for row in range(rows):
                for column in range(DOT_COLUMNS):
                    place = builder.add(builder.mul(out_stride, _const(row)), builder.mul(out_step, _const(column)))
                    builder.store(next(sums), pointer(builder, builder.add(out, place), F32))

        for_each_count(builder, num_rows, DOT_ROWS, emit)
        return context.get_dummy_value()

    return intrinsic(
        lambda context, num_rows, x, x_stride, w0, w1, w2, w3, depth, out, out_stride, out_step, ahead, speed: (
            types.void(*[types.intp] * 13),
            generate,
        )
    )


_dot_bfloat16 = _dot_tile(Format.BFLOAT16, _PAIRED if MULTIPLIES_PAIRS else _HALVED)
_dot_float32, _dot_float16 = _dot_tile(Format.FLOAT32), _dot_tile(Format.FLOAT16)
_dot_int8 = _dot_tile(Format.INT8)


def _emit_store_halves(builder: ir.IRBuilder, address: ir.Value, first: ir.Value, second: ir.Value) -> None:
    """Thirty-two numbers: those of even places, then those of odd ones."""
    for half in range(2):
        lanes = range(half, PAIRS, 2)
        emit_store(builder, builder.add(address, _const(4 * LANES * half)), shuffle(builder, first, second, lanes))


_store_halves = operation3(types.void, types.intp, float32x16, float32x16, _emit_store_halves)


@native
def arranged_bytes(depth: int) -> int:
    """What a row of `depth` activations takes up once it is arranged."""
    return 2 * depth if MULTIPLIES_PAIRS else (depth + PAIRS - 1) // PAIRS * PAIRS * 4


@native
def arrange_row(source: int, target: int, depth: int) -> None:
    """A row of activations as a dot tile takes it up for bfloat16 weights, from float32.

    Pairs: rounded to bfloat16. Halves: of every 32 numbers first those of even places, then the others; zeros follow.
    """
    if MULTIPLIES_PAIRS:
        store_row(source, target, depth, BFLOAT16)
        return
    whole = depth // PAIRS * PAIRS
    for index in range(0, whole, PAIRS):
        _store_halves(target + 4 * index, load(source + 4 * index), load(source + 4 * (index + LANES)))
    if whole < depth:
        first = load_part(source + 4 * whole, min(depth - whole, LANES))
        second = load_part(source + 4 * (whole + LANES), max(depth - whole - LANES, 0))
        _store_halves(target + 4 * whole, first, second)


@native
def dot_tile(
    stored: int,
    num_rows: int,
    x: int,
    x_stride: int,
    w0: int,
    w1: int,
    w2: int,
    w3: int,
    depth: int,
    out: int,
    out_stride: int,
    out_step: int,
    ahead: int,
    speed: int,
) -> None:
    """out[row, j] = dot(x[row], w_j) for 1 <= num_rows <= 6 rows and four vectors of `depth` elements.

    stored: the Format of w; strides are bytes between rows, out_step between out's columns; x and out are float32, but
    for bfloat16 weights x is as arrange_row leaves it. ahead, speed: what to prefetch meanwhile, from so many bytes
    past each column's first element on, speed / FULL_SPEED bytes per element.
    """
    if stored == BFLOAT16:
        _dot_bfloat16(num_rows, x, x_stride, w0, w1, w2, w3, depth, out, out_stride, out_step, ahead, speed)
    elif stored == INT8:
        _dot_int8(num_rows, x, x_stride, w0, w1, w2, w3, depth, out, out_stride, out_step, ahead, speed)
    elif stored == FLOAT16:
        _dot_float16(num_rows, x, x_stride, w0, w1, w2, w3, depth, out, out_stride, out_step, ahead, speed)
    else:
        _dot_float32(num_rows, x, x_stride, w0, w1, w2, w3, depth, out, out_stride, out_step, ahead, speed)
