"""The inner loops of matrix products and attention, each a block of accumulators that never leaves the registers.

    dot tile          out[row, 0..3] = sum_k x[row, k] * w_j[k]       up to 6 rows x 4 vectors w_0 .. w_3
    accumulate tile   out[row, 0..63] += sum_j p[row, j] * v_j[0..63]  up to 4 rows x 64 columns

Order of additions in a dot product, the same for every tile shape: lane i adds x[k] * w[k] for k = i, i + 16, ... in
turn, fused; then the lanes are added by the tree of simd.fold_quarters. Paired, lane i adds the products of 2i + 1 and
2i, then those of 32 further on, and so on. In an accumulate tile each column adds its
products in the order of j, fused, on top of what `out` holds. So a row's result does not depend on the tile it was in.
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
from cluster.runtime.kernels.formats import (
    BFLOAT16,
    BYTES_MASK,
    FLOAT16,
    INT8,
    Format,
    emit_load_as,
    emit_load_part_as,
)
from cluster.runtime.kernels.simd import (
    F32,
    I32,
    I64,
    LANES,
    MULTIPLIES_PAIRS,
    PAIRS,
    V16F32,
    emit_add_products,
    emit_broadcast,
    emit_fma,
    emit_load,
    emit_load_part,
    emit_pairs,
    emit_pairs_part,
    emit_prefetch,
    emit_store,
    emit_store_part,
    fold,
    fold_quarters,
    pointer,
    splat,
    stack_slot,
)

DOT_ROWS = 6  # most rows of a dot tile: 6 x 4 accumulators + 4 weights + 1 activation of 32 registers
DOT_COLUMNS = 4
SUM_ROWS = 4
SUM_VECTORS = 4


def _const(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


@dataclass(frozen=True, slots=True)
class _Factors:
    """How a dot tile takes up activations and weights, `count` of each at a time, and multiplies them."""

    count: int
    activations: Format
    load: Callable[[ir.IRBuilder, Format, ir.Value, ir.Value | None], ir.Value]
    add_product: Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]  # of activation, weight, sum


def _load_widened(builder: ir.IRBuilder, stored: Format, address: ir.Value, count: ir.Value | None) -> ir.Value:
    if count is None:
        return emit_load_as(builder, stored, address)
    return emit_load_part_as(builder, stored, address, count)


def _load_pairs(builder: ir.IRBuilder, _: Format, address: ir.Value, count: ir.Value | None) -> ir.Value:
    return emit_pairs(builder, address) if count is None else emit_pairs_part(builder, address, count)


_WIDENED = _Factors(LANES, Format.FLOAT32, _load_widened, emit_fma)
_PAIRED = _Factors(PAIRS, Format.BFLOAT16, _load_pairs, emit_add_products)


class _DotTile:
    """Writes the code of one dot tile of a fixed number of rows."""

    def __init__(self, builder: ir.IRBuilder, num_rows: int, stored: Format, factors: _Factors) -> None:
        self._builder = builder
        self._stored = stored
        self._factors = factors
        self._sums = [[stack_slot(builder, V16F32) for _ in range(DOT_COLUMNS)] for _ in range(num_rows)]

    def emit(
        self, x: ir.Value, x_stride: ir.Value, columns: Sequence[ir.Value], depth: ir.Value, ahead: ir.Value
    ) -> list[ir.Value]:
        """x: address of row 0; x_stride: bytes between rows; columns: addresses of w_j; returns one <4> per row."""
        builder = self._builder
        rows = [builder.add(x, builder.mul(x_stride, _const(row))) for row in range(len(self._sums))]
        self._multiply(rows, columns, depth, ahead)
        return [fold_quarters(builder, self._folded(row, 0), self._folded(row, 2)) for row in range(len(rows))]

    def _folded(self, row: int, column: int) -> ir.Value:
        """The sums of two columns next to each other, folded once into one vector."""
        first, second = self._sums[row][column : column + 2]
        return fold(self._builder, self._builder.load(first), self._builder.load(second), LANES)

    def _multiply(self, rows: list[ir.Value], columns: Sequence[ir.Value], depth: ir.Value, ahead: ir.Value) -> None:
        """Leave the products of every row and column in _sums, lane by lane."""
        builder = self._builder
        for place in (place for row in self._sums for place in row):
            builder.store(splat(0.0), place)
        step = self._factors.count
        whole = builder.and_(depth, _const(-step))
        with cgutils.for_range_slice(builder, _const(0), whole, _const(step), I64) as (k, _):
            offset = builder.add(ahead, builder.mul(k, _const(self._stored.num_bytes)))
            for column in columns:
                emit_prefetch(builder, builder.add(column, offset))
            self._add(k, rows, columns, None)
        rest = builder.sub(depth, whole)
        with builder.if_then(builder.icmp_signed("!=", rest, _const(0)), likely=False):
            self._add(whole, rows, columns, rest)

    def _add(self, k: ir.Value, rows: list[ir.Value], columns: Sequence[ir.Value], count: ir.Value | None) -> None:
        weights = [self._element(self._stored, column, k, count) for column in columns]
        for row, places in zip(rows, self._sums, strict=True):
            activation = self._element(self._factors.activations, row, k, count)
            for weight, place in zip(weights, places, strict=True):
                total = self._factors.add_product(self._builder, activation, weight, self._builder.load(place))
                self._builder.store(total, place)

    def _element(self, stored: Format, base: ir.Value, k: ir.Value, count: ir.Value | None) -> ir.Value:
        address = self._builder.add(base, self._builder.mul(k, _const(stored.num_bytes)))
        return self._factors.load(self._builder, stored, address, count)


class _SumTile:
    """Writes the code of one accumulate tile of a fixed number of rows and vectors of columns."""

    def __init__(self, builder: ir.IRBuilder, num_rows: int, num_vectors: int, stored: Format) -> None:
        self._builder = builder
        self._stored = stored
        self._sums = [[stack_slot(builder, V16F32) for _ in range(num_vectors)] for _ in range(num_rows)]

    def emit(
        self, weights: _Rows, offsets: ir.Value, values: ir.Value, num_keys: ir.Value, out: _Rows, width: ir.Value
    ) -> None:
        """Add num_keys weighted vectors to `out`; offsets: address of the byte offset of each vector from `values`."""
        builder = self._builder
        partial = len(self._sums[0]) == 1
        for row, places in enumerate(self._sums):
            for vector, place in enumerate(places):
                address = out.at(builder, row, vector * LANES * 4)
                builder.store(
                    emit_load_part(builder, address, width) if partial else emit_load(builder, address), place
                )
        with cgutils.for_range(builder, num_keys) as loop:
            offset = builder.load(pointer(builder, builder.add(offsets, builder.mul(loop.index, _const(8))), I64))
            self._add_key(weights, loop.index, builder.add(values, offset), width if partial else None)
        for row, places in enumerate(self._sums):
            for vector, place in enumerate(places):
                address = out.at(builder, row, vector * LANES * 4)
                if partial:
                    emit_store_part(builder, address, builder.load(place), width)
                else:
                    emit_store(builder, address, builder.load(place))

    def _add_key(self, weights: _Rows, key: ir.Value, value: ir.Value, width: ir.Value | None) -> None:
        builder = self._builder
        vectors = [self._value(value, vector, width) for vector in range(len(self._sums[0]))]
        for row, places in enumerate(self._sums):
            address = builder.add(weights.at(builder, row, 0), builder.mul(key, _const(4)))
            weight = emit_broadcast(builder, builder.load(pointer(builder, address, F32)))
            for vector, place in zip(vectors, places, strict=True):
                builder.store(emit_fma(builder, weight, vector, builder.load(place)), place)

    def _value(self, base: ir.Value, vector: int, width: ir.Value | None) -> ir.Value:
        address = self._builder.add(base, _const(vector * LANES * self._stored.num_bytes))
        if width is None:
            return emit_load_as(self._builder, self._stored, address)
        return emit_load_part_as(self._builder, self._stored, address, width)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Addresses of equally spaced float32 rows."""

    base: ir.Value
    stride: ir.Value  # bytes

    def at(self, builder: ir.IRBuilder, row: int, offset: int) -> ir.Value:
        return builder.add(self.base, builder.add(builder.mul(self.stride, _const(row)), _const(offset)))


def _for_each_count(builder: ir.IRBuilder, count: ir.Value, largest: int, emit: Callable[[int], None]) -> None:
    """Choose at run time among the code that emit(1) .. emit(largest) writes; other counts do nothing."""
    after = builder.append_basic_block("after_tile")
    switch = builder.switch(count, after)
    for variant in range(1, largest + 1):
        block = builder.append_basic_block(f"tile_{variant}")
        switch.add_case(_const(variant), block)
        builder.position_at_end(block)
        emit(variant)
        builder.branch(after)
    builder.position_at_end(after)


def _dot_tile(stored: Format, factors: _Factors = _WIDENED) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, _: Any, values: Sequence[ir.Value]) -> ir.Value:
        num_rows, x, x_stride, *columns, depth, out, out_stride, out_step, ahead = values

        def emit(rows: int) -> None:
            sums = _DotTile(builder, rows, stored, factors).emit(x, x_stride, columns, depth, ahead)
            for row, four in enumerate(sums):
                for column in range(DOT_COLUMNS):
                    address = builder.add(
                        _Rows(out, out_stride).at(builder, row, 0), builder.mul(out_step, _const(column))
                    )
                    value = builder.extract_element(four, ir.Constant(I32, column))
                    builder.store(value, pointer(builder, address, F32))

        _for_each_count(builder, num_rows, DOT_ROWS, emit)
        return context.get_dummy_value()

    return intrinsic(
        lambda context, num_rows, x, x_stride, w0, w1, w2, w3, depth, out, out_stride, out_step, ahead: (
            types.void(*[types.intp] * 12),
            generate,
        )
    )


def _sum_tile(stored: Format, most_rows: int, num_vectors: int) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, _: Any, values: Sequence[ir.Value]) -> ir.Value:
        num_rows, p, p_stride, offsets, base, num_keys, out, out_stride, width = values

        def emit(rows: int) -> None:
            tile = _SumTile(builder, rows, num_vectors, stored)
            tile.emit(_Rows(p, p_stride), offsets, base, num_keys, _Rows(out, out_stride), width)

        _for_each_count(builder, num_rows, most_rows, emit)
        return context.get_dummy_value()

    return intrinsic(
        lambda context, num_rows, p, p_stride, offsets, base, num_keys, out, out_stride, width: (
            types.void(*[types.intp] * 9),
            generate,
        )
    )


_dot_float32, _dot_bfloat16 = _dot_tile(Format.FLOAT32), _dot_tile(Format.BFLOAT16)
_dot_pairs = _dot_tile(Format.BFLOAT16, _PAIRED if MULTIPLIES_PAIRS else _WIDENED)  # else it is never called
_dot_float16, _dot_int8 = _dot_tile(Format.FLOAT16), _dot_tile(Format.INT8)
_sum_float32 = _sum_tile(Format.FLOAT32, SUM_ROWS, SUM_VECTORS)
_sum_bfloat16 = _sum_tile(Format.BFLOAT16, SUM_ROWS, SUM_VECTORS)
_sum_float16 = _sum_tile(Format.FLOAT16, SUM_ROWS, SUM_VECTORS)
_part_float32 = _sum_tile(Format.FLOAT32, 1, 1)
_part_bfloat16 = _sum_tile(Format.BFLOAT16, 1, 1)
_part_float16 = _sum_tile(Format.FLOAT16, 1, 1)


@native
def dot_tile(
    stored: int,
    paired: bool,
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
) -> None:
    """out[row, j] = dot(x[row], w_j) for 1 <= num_rows <= 6 rows and four vectors of `depth` elements.

    stored: the Format of w; strides are bytes between rows, out_step between out's columns; x and out are float32.
    ahead: how many bytes past each element to prefetch, where weights stream from memory; 0 where they are at hand.
    """
    if paired:
        _dot_pairs(num_rows, x, x_stride, w0, w1, w2, w3, depth, out, out_stride, out_step, ahead)
    elif stored == BFLOAT16:
        _dot_bfloat16(num_rows, x, x_stride, w0, w1, w2, w3, depth, out, out_stride, out_step, ahead)
    elif stored == INT8:
        _dot_int8(num_rows, x, x_stride, w0, w1, w2, w3, depth, out, out_stride, out_step, ahead)
    elif stored == FLOAT16:
        _dot_float16(num_rows, x, x_stride, w0, w1, w2, w3, depth, out, out_stride, out_step, ahead)
    else:
        _dot_float32(num_rows, x, x_stride, w0, w1, w2, w3, depth, out, out_stride, out_step, ahead)


@native
def _add_vectors(
    stored: int, num_rows: int, p: int, p_stride: int, offsets: int, values: int, num_keys: int, out: int, stride: int
) -> None:
    if stored == BFLOAT16:
        _sum_bfloat16(num_rows, p, p_stride, offsets, values, num_keys, out, stride, 0)
    elif stored == FLOAT16:
        _sum_float16(num_rows, p, p_stride, offsets, values, num_keys, out, stride, 0)
    else:
        _sum_float32(num_rows, p, p_stride, offsets, values, num_keys, out, stride, 0)


@native
def _add_part(stored: int, p: int, offsets: int, values: int, num_keys: int, out: int, width: int) -> None:
    if stored == BFLOAT16:
        _part_bfloat16(1, p, 0, offsets, values, num_keys, out, 0, width)
    elif stored == FLOAT16:
        _part_float16(1, p, 0, offsets, values, num_keys, out, 0, width)
    else:
        _part_float32(1, p, 0, offsets, values, num_keys, out, 0, width)


@native
def accumulate(
    stored: int,
    num_rows: int,
    p: int,
    p_stride: int,
    offsets: int,
    values: int,
    num_keys: int,
    out: int,
    out_stride: int,
    width: int,
) -> None:
    """out[row, :] += sum over j < num_keys of p[row, j] * v_j[:], for 1 <= num_rows <= 4 rows of `width` columns.

    v_j lies offsets[j] bytes (int64) past `values`; stored: its Format, not int8.
    """
    whole, num_bytes = width - width % (SUM_VECTORS * LANES), stored & BYTES_MASK
    for column in range(0, whole, SUM_VECTORS * LANES):
        place = values + column * num_bytes
        _add_vectors(stored, num_rows, p, p_stride, offsets, place, num_keys, out + column * 4, out_stride)
    for column in range(whole, width, LANES):
        part = min(width - column, LANES)
        for row in range(num_rows):
            target = out + row * out_stride + column * 4
            _add_part(stored, p + row * p_stride, offsets, values + column * num_bytes, num_keys, target, part)
