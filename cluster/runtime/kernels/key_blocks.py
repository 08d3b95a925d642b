"""Keys and values as the inner loop of attention takes them up: float32, close together, a block of keys side by side.

keys      | key 0: feature 0 .. d - 1 |  ->  | feature 0: key 0 .. 63 | feature 1: key 0 .. 63 | ...
            somewhere in the cache           a score is then a sum of rows, weighted with the query's features
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cluster.runtime.kernels.compiling import native
from cluster.runtime.kernels.emit import (
    I64,
    LANES,
    PAIRS,
    V16F32,
    V16I32,
    emit_halves,
    emit_pairs,
    emit_store,
    pointer,
    transpose,
)
from cluster.runtime.kernels.formats import BFLOAT16, FLOAT16, Format, emit_load_as, emit_load_part_as, load_row
from cluster.runtime.kernels.simd import load_int64

KEY_BLOCK = 64


def _const(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def _features(stored: Format) -> int:
    """How many features of sixteen keys are turned at once: bfloat16 in pairs, which halves the moves between lanes."""
    return PAIRS if stored is Format.BFLOAT16 else LANES


def _emit_load(builder: ir.IRBuilder, stored: Format, address: ir.Value, count: ir.Value | None) -> ir.Value:
    if stored is Format.BFLOAT16:
        return emit_pairs(builder, address, count)
    if count is None:
        return builder.bitcast(emit_load_as(builder, stored, address), V16I32)
    return builder.bitcast(emit_load_part_as(builder, stored, address, count), V16I32)


def _emit_turned(builder: ir.IRBuilder, stored: Format, keys: Sequence[ir.Value]) -> list[ir.Value]:
    """One vector of float32 for each feature, from one vector for each key."""
    turned = transpose(builder, keys)
    if stored is Format.BFLOAT16:
        return [half for pairs in turned for half in emit_halves(builder, pairs)]
    return [builder.bitcast(vector, V16F32) for vector in turned]


def _turning(stored: Format) -> Any:
    """Code that turns sixteen keys."""
    step = _features(stored)

    def generate(context: Any, builder: ir.IRBuilder, _: Any, values: Sequence[ir.Value]) -> ir.Value:
        keys, offsets, depth, out, out_stride = values
        places = [builder.load(pointer(builder, builder.add(offsets, _const(8 * key)), I64)) for key in range(LANES)]
        bases = [builder.add(keys, place) for place in places]

        def turn(feature: ir.Value, count: ir.Value | None) -> None:
            start = builder.mul(feature, _const(stored.num_bytes))
            vectors = [_emit_load(builder, stored, builder.add(base, start), count) for base in bases]
            for index, vector in enumerate(_emit_turned(builder, stored, vectors)):
                row = builder.mul(builder.add(feature, _const(index)), out_stride)
                emit_store(builder, builder.add(out, row), vector)

        whole = builder.and_(depth, _const(-step))
        with cgutils.for_range_slice(builder, _const(0), whole, _const(step), I64) as (feature, _):
            turn(feature, None)
        rest = builder.sub(depth, whole)
        with builder.if_then(builder.icmp_signed("!=", rest, _const(0)), likely=False):
            turn(whole, rest)
        return context.get_dummy_value()

    return intrinsic(lambda context, keys, offsets, depth, out, out_stride: (types.void(*[types.intp] * 5), generate))


_turn_bfloat16, _turn_float16 = _turning(Format.BFLOAT16), _turning(Format.FLOAT16)
_turn_float32 = _turning(Format.FLOAT32)


@native
def turned_rows(depth: int) -> int:
    """Rows of the memory that turn_keys writes to: features, rounded up to what it turns at once."""
    return (depth + PAIRS - 1) // PAIRS * PAIRS


@native
def turn_keys(stored: int, keys: int, offsets: int, depth: int, out: int) -> None:
    """Sixteen keys of `depth` features, stored in a Format, as columns of float32 rows of KEY_BLOCK.

    Key j lies offsets[j] bytes (int64) past `keys`; out is the address of the first key's column in the first row.
    """
    if stored == BFLOAT16:
        _turn_bfloat16(keys, offsets, depth, out, 4 * KEY_BLOCK)
    elif stored == FLOAT16:
        _turn_float16(keys, offsets, depth, out, 4 * KEY_BLOCK)
    else:
        _turn_float32(keys, offsets, depth, out, 4 * KEY_BLOCK)


@native
def widen_values(stored: int, values: int, offsets: int, count: int, depth: int, out: int, out_stride: int) -> None:
    """`count` values of `depth` features as float32 rows; value j lies offsets[j] bytes past `values`."""
    for index in range(count):
        load_row(values + load_int64(offsets + 8 * index), out + index * out_stride, depth, stored)
