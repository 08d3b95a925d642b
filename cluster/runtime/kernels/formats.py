"""How numbers lie in memory, and how sixteen of them become float32 lanes; arithmetic is float32 throughout.

float32     as they are
bfloat16    widened exactly
float16     widened exactly; stored rounded to nearest even, beyond 65504 as infinity
int8        as whole numbers from -127 to 127; what they are worth is a scale of their row, applied to the sum
"""

from __future__ import annotations

from enum import Enum

from llvmlite import ir
from numba import types

from cluster.runtime.kernels.compiling import native
from cluster.runtime.kernels.emit import (
    LANES,
    V16F32,
    V16I32,
    emit_load,
    emit_load_bf16,
    emit_load_bf16_part,
    emit_load_part,
    load_lanes,
    pointer,
    store_lanes,
)
from cluster.runtime.kernels.simd import (
    float32x16,
    load,
    load_bf16,
    load_bf16_part,
    load_part,
    operation1,
    operation2,
    operation3,
    store,
    store_bf16,
    store_bf16_part,
    store_part,
)

_V16F16, _V16I8 = ir.VectorType(ir.HalfType(), LANES), ir.VectorType(ir.IntType(8), LANES)


class Format(Enum):
    """A stored number, by the code that kernels are given: its low four bits are the bytes of an element."""

    FLOAT32 = 4
    BFLOAT16 = 2
    FLOAT16 = 0x12
    INT8 = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return self.value & BYTES_MASK


BYTES_MASK = 15
FLOAT32, BFLOAT16, FLOAT16, INT8 = (member.value for member in Format)  # for compiled code


def emit_load_as(builder: ir.IRBuilder, stored: Format, address: ir.Value) -> ir.Value:
    """Sixteen stored numbers as float32."""
    match stored:
        case Format.FLOAT32:
            return emit_load(builder, address)
        case Format.BFLOAT16:
            return emit_load_bf16(builder, address)
        case Format.FLOAT16:
            return builder.fpext(builder.load(pointer(builder, address, _V16F16), align=2), V16F32)
        case Format.INT8:
            return _whole_numbers(builder, builder.load(pointer(builder, address, _V16I8), align=1))


def emit_load_part_as(builder: ir.IRBuilder, stored: Format, address: ir.Value, count: ir.Value) -> ir.Value:
    """`count` <= 16 stored numbers as float32, zeros in the other lanes; touches no memory past them."""
    match stored:
        case Format.FLOAT32:
            return emit_load_part(builder, address, count)
        case Format.BFLOAT16:
            return emit_load_bf16_part(builder, address, count)
        case Format.FLOAT16:
            return builder.fpext(load_lanes(builder, address, count, _V16F16), V16F32)
        case Format.INT8:
            return _whole_numbers(builder, load_lanes(builder, address, count, _V16I8))


def _whole_numbers(builder: ir.IRBuilder, bytes_: ir.Value) -> ir.Value:
    return builder.sitofp(builder.sext(bytes_, V16I32), V16F32)


def _store_fp16(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    builder.store(builder.fptrunc(value, _V16F16), pointer(builder, address, _V16F16), align=2)


def _store_fp16_part(builder: ir.IRBuilder, address: ir.Value, value: ir.Value, count: ir.Value) -> None:
    store_lanes(builder, address, builder.fptrunc(value, _V16F16), count)


load_fp16 = operation1(float32x16, types.intp, lambda builder, a: emit_load_as(builder, Format.FLOAT16, a))
load_fp16_part = operation2(
    float32x16, types.intp, types.intp, lambda builder, a, count: emit_load_part_as(builder, Format.FLOAT16, a, count)
)
load_int8 = operation1(float32x16, types.intp, lambda builder, a: emit_load_as(builder, Format.INT8, a))
load_int8_part = operation2(
    float32x16, types.intp, types.intp, lambda builder, a, count: emit_load_part_as(builder, Format.INT8, a, count)
)
store_fp16 = operation2(types.void, types.intp, float32x16, _store_fp16)
store_fp16_part = operation3(types.void, types.intp, float32x16, types.intp, _store_fp16_part)


@native
def store_row(source: int, target: int, count: int, stored: int) -> None:
    """`count` adjacent float32 in a Format, but for int8, which needs scales."""
    whole = count & -LANES
    for index in range(0, whole, LANES):
        if stored == BFLOAT16:
            store_bf16(target + 2 * index, load(source + 4 * index))
        elif stored == FLOAT16:
            store_fp16(target + 2 * index, load(source + 4 * index))
        else:
            store(target + 4 * index, load(source + 4 * index))
    if whole < count:
        rest, place = load_part(source + 4 * whole, count - whole), target + whole * (stored & BYTES_MASK)
        if stored == BFLOAT16:
            store_bf16_part(place, rest, count - whole)
        elif stored == FLOAT16:
            store_fp16_part(place, rest, count - whole)
        else:
            store_part(place, rest, count - whole)


@native
def load_row(source: int, target: int, count: int, stored: int) -> None:
    """`count` adjacent numbers of a Format as float32, but for int8, whose scales are elsewhere."""
    whole = count & -LANES
    for index in range(0, whole, LANES):
        if stored == BFLOAT16:
            store(target + 4 * index, load_bf16(source + 2 * index))
        elif stored == FLOAT16:
            store(target + 4 * index, load_fp16(source + 2 * index))
        else:
            store(target + 4 * index, load(source + 4 * index))
    if whole < count:
        place, rest = source + whole * (stored & BYTES_MASK), count - whole
        if stored == BFLOAT16:
            store_part(target + 4 * whole, load_bf16_part(place, rest), rest)
        elif stored == FLOAT16:
            store_part(target + 4 * whole, load_fp16_part(place, rest), rest)
        else:
            store_part(target + 4 * whole, load_part(place, rest), rest)
