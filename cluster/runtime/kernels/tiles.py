"""The inner loops of matrix products and attention, each a block of accumulators that never leaves the registers.

    dot tile          out[row, 0..3] = sum_k x[row, k] * w_j[k]       up to 8 rows x 4 vectors w_0 .. w_3
    accumulate tile   out[row, 0..63] += sum_j p[row, j] * v_j[0..63]  up to 4 rows x 64 columns

Order of additions in a dot product, the same for every tile shape: lane i adds x[k] * w[k] for k = i, i + 16, ... in
turn, fused; then the lanes are added by the tree of simd.fold_quarters. In an accumulate tile each column adds its
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
    I64,
    LANES,
    V16F32,
    emit_broadcast,
    emit_fma,
    emit_load,
    emit_load_part,
    emit_prefetch,
    emit_store,
    emit_store_part,
    fold,
    fold_quarters,
    pointer,
    splat,
    stack_slot,
)

DOT_ROWS = 8  # most rows of a dot tile: 8 x 2 accumulators + 2 weights + 1 activation of 32 registers
DOT_COLUMNS = 4
SUM_ROWS = 4
SUM_VECTORS = 4


def _const(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


class _DotTile:
    """Writes the code of one dot tile of a fixed number of rows: its columns go in two pairs.

    The fewer streams of weights at once, the better memory follows them; one leaves more loads than sums.
    """

    def __init__(self, builder: ir.IRBuilder, num_rows: int, stored: Format) -> None:
        self._builder = builder
        self._stored = stored
        self._sums = [[stack_slot(builder, V16F32) for _ in range(2)] for _ in range(num_rows)]

    def emit(
        self, x: ir.Value, x_stride: ir.Value, columns: Sequence[ir.Value], depth: ir.Value, ahead: ir.Value
    ) -> list[ir.Value]:
        """x: address of row 0; x_stride: bytes between rows; columns: addresses of w_j; returns one <4> per row."""
        builder = self._builder
        rows = [builder.add(x, builder.mul(x_stride, _const(row))) for row in range(len(self._sums))]
        halves = [stack_slot(builder, ir.ArrayType(V16F32, 2)) for _ in rows]
        # A loop, since code for each pair takes twice as long to compile.
        with cgutils.for_range(builder, _const(2)) as loop:
            is_first = builder.icmp_signed("==", loop.index, _const(0))
            pair = [builder.select(is_first, *choices) for choices in zip(columns[:2], columns[2:], strict=True)]
            for half, place in zip(self._pair(rows, pair, depth, ahead), halves, strict=True):
                builder.store(half, builder.gep(place, [_const(0), loop.index]))
        both = [[builder.load(builder.gep(place, [_const(0), _const(pair)])) for pair in (0, 1)] for place in halves]
        return [fold_quarters(builder, first, second) for first, second in both]

    def _pair(
        self, rows: list[ir.Value], columns: Sequence[ir.Value], depth: ir.Value, ahead: ir.Value
    ) -> list[ir.Value]:
        """Per row the sums of two columns, folded once into one vector."""
        builder = self._builder
        for place in (place for row in self._sums for place in row):
            builder.store(splat(0.0), place)
        whole = builder.and_(depth, _const(-LANES))
        with cgutils.for_range_slice(builder, _const(0), whole, _const(LANES), I64) as (k, _):
            offset = builder.add(ahead, builder.mul(k, _const(self._stored.num_bytes)))
            for column in columns:
                emit_prefetch(builder, builder.add(column, offset))
            self._add(k, rows, columns, None)
        rest = builder.sub(depth, whole)
        with builder.if_then(builder.icmp_signed("!=", rest, _const(0)), likely=False):
            self._add(whole, rows, columns, rest)
        return [fold(builder, builder.load(a), builder.load(b), LANES) for a, b in self._sums]

    def _add(self, k: ir.Value, rows: list[ir.Value], columns: Sequence[ir.Value], count: ir.Value | None) -> None:
        weights = [self._element(self._stored, column, k, count) for column in columns]
        for row, places in zip(rows, self._sums, strict=True):
            activation = self._element(Format.FLOAT32, row, k, count)
            for weight, place in zip(weights, places, strict=True):
                total = emit_fma(self._builder, activation, weight, self._builder.load(place))
                self._builder.store(total, place)

    def _element(self, stored: Format, base: ir.Value, k: ir.Value, count: ir.Value | None) -> ir.Value:
        address = self._builder.add(base, self._builder.mul(k, _const(stored.num_bytes)))
        if count is None:
            return emit_load_as(self._builder, stored, address)
        return emit_load_part_as(self._builder, stored, address, count)


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


def _dot_tile(stored: Format) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, _: Any, values: Sequence[ir.Value]) -> ir.Value:
        num_rows, x, x_stride, *columns, depth, out, out_stride, ahead = values

        def emit(rows: int) -> None:
            sums = _DotTile(builder, rows, stored).emit(x, x_stride, columns, depth, ahead)
            for row, four in enumerate(sums):
                emit_store(builder, _Rows(out, out_stride).at(builder, row, 0), four)

        _for_each_count(builder, num_rows, DOT_ROWS, emit)
        return context.get_dummy_value()

    return intrinsic(
        lambda context, num_rows, x, x_stride, w0, w1, w2, w3, depth, out, out_stride, ahead: (
            types.void(*[types.intp] * 11),
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
    ahead: int,
) -> None:
    """out[row, j] = dot(x[row], w_j) for 1 <= num_rows <= 8 rows and four vectors of `depth` elements.

    stored: the Format of w; strides are bytes between rows; x and out are float32.
    ahead: how many bytes past each element to prefetch, where weights stream from memory; 0 where they are at hand.
    """
    if stored == BFLOAT16:
        _dot_bfloat16(num_rows, x, x_stride, w0, w1, w2, w3, depth, out, out_stride, ahead)
    elif stored == INT8:
        _dot_int8(num_rows, x, x_stride, w0, w1, w2, w3, depth, out, out_stride, ahead)
    elif stored == FLOAT16:
        _dot_float16(num_rows, x, x_stride, w0, w1, w2, w3, depth, out, out_stride, ahead)
    else:
        _dot_float32(num_rows, x, x_stride, w0, w1, w2, w3, depth, out, out_stride, ahead)


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
