"""The inner loop of attention, a block of accumulators that never leaves the registers.

    accumulate tile   out[row, 0..63] += sum_j p[row, j] * v_j[0..63]  up to 4 rows x 64 columns

With weights p it sums values v_j; with a query's features p it sums the rows of keys that lie side by side, to scores.
Each column adds its products in the order of j, fused, on top of what `out` holds. So a row's result does not depend on
the tile it was in.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    V16F32,
    emit_broadcast,
    emit_fma,
    emit_load,
    emit_load_part,
    emit_store,
    emit_store_part,
    for_each_count,
    pointer,
    stack_slot,
)
from cluster.runtime.kernels.formats import BFLOAT16, BYTES_MASK, FLOAT16, Format, emit_load_as, emit_load_part_as

SUM_ROWS = 4
SUM_VECTORS = 4


def _const(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


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


def _sum_tile(stored: Format, most_rows: int, num_vectors: int) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, _: Any, values: Sequence[ir.Value]) -> ir.Value:
        num_rows, p, p_stride, offsets, base, num_keys, out, out_stride, width = values

        def emit(rows: int) -> None:
            tile = _SumTile(builder, rows, num_vectors, stored)
            tile.emit(_Rows(p, p_stride), offsets, base, num_keys, _Rows(out, out_stride), width)

        for_each_count(builder, num_rows, most_rows, emit)
        return context.get_dummy_value()

    return intrinsic(
        lambda context, num_rows, p, p_stride, offsets, base, num_keys, out, out_stride, width: (
            types.void(*[types.intp] * 9),
            generate,
        )
    )


_sum_float32 = _sum_tile(Format.FLOAT32, SUM_ROWS, SUM_VECTORS)
_sum_bfloat16 = _sum_tile(Format.BFLOAT16, SUM_ROWS, SUM_VECTORS)
_sum_float16 = _sum_tile(Format.FLOAT16, SUM_ROWS, SUM_VECTORS)
_part_float32 = _sum_tile(Format.FLOAT32, 1, 1)
_part_bfloat16 = _sum_tile(Format.BFLOAT16, 1, 1)
_part_float16 = _sum_tile(Format.FLOAT16, 1, 1)


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
