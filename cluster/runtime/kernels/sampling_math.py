"""Scalar machine code that the sampling kernel's loops vectorise: the counter hash, noise, weights, ordered bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cluster.core import keyed_noise
from cluster.core.sampling import WEIGHT_SCALE
from cluster.runtime.kernels.compiling import native

MAX_GUMBEL = keyed_noise.MAX_GUMBEL
INFINITY_BITS = 0x7F800000

_GAMMA = np.uint64(keyed_noise.GAMMA)
_MULTIPLIER_1 = np.uint64(keyed_noise.MULTIPLIER_1)
_MULTIPLIER_2 = np.uint64(keyed_noise.MULTIPLIER_2)
_NOISE_SHIFT = np.uint64(64 - keyed_noise.UNIFORM_BITS)
_NOISE_UNIT = 2.0**-keyed_noise.UNIFORM_BITS

# Bound on the noise: c = the top 24 of the flipped bits, so 1 - u ≥ c / 2**24; read as an integer, the float32 c is at
# most (log2(c) + 127) * 2**23. A slack far above float32's rounding errors keeps it a bound.
_BOUND_SHIFT = np.uint64(40)
_BOUND_SLOPE = np.float32(math.log(2) / 2**23)
BOUND_OFFSET = (127 + 24) * math.log(2) + 2.0**-8

# e**x by 2**n * polynomial(x - n ln 2). ln 2 is split so that n * _LN2_HIGH is exact. Adding _ROUNDER rounds a double
# to an integer, which is then in its low bits.
_LOG2_E = 1 / math.log(2)
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_ROUNDER = 1.5 * 2.0**52
_ROUNDER_BITS = int(np.float64(_ROUNDER).view(np.int64))
_SCALE_EXPONENT = 1023 + int(math.log2(WEIGHT_SCALE))
LOWEST_X = -math.log(4 * WEIGHT_SCALE)  # well below it, every weight rounds to 0
_TAYLOR = tuple(1 / math.factorial(n) for n in range(12, -1, -1))


@intrinsic  # type: ignore[untyped-decorator]
def _float32_bits(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _float32_of(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _float64_bits(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(64))

    return types.int64(types.float64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _float64_of(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), generate


@native
def output(seed: np.uint64, index: np.uint64) -> np.uint64:
    """keyed_noise.output."""
    value = seed + (index + np.uint64(1)) * _GAMMA
    value = (value ^ (value >> np.uint64(30))) * _MULTIPLIER_1
    value = (value ^ (value >> np.uint64(27))) * _MULTIPLIER_2
    return value ^ (value >> np.uint64(31))


@native
def gumbel_of(bits: np.uint64) -> float:
    """keyed_noise.gumbel_of."""
    return -math.log(-math.log((np.float64(bits >> _NOISE_SHIFT) + 0.5) * _NOISE_UNIT))


@native
def noise_bound(bits: np.uint64) -> np.float32:
    """At least the noise minus BOUND_OFFSET."""
    flipped = np.float32(np.int32(~bits >> _BOUND_SHIFT))
    return -np.float32(_float32_bits(flipped)) * _BOUND_SLOPE


@native
def _flip_negative(bits: np.int32) -> np.int32:
    return np.int32(bits ^ np.int32((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@native
def ordered(value: np.float32) -> np.int32:
    """An integer that orders as the float does; both zeros give the same one."""
    return _flip_negative(_float32_bits(value + np.float32(0)))  # -0.0 + 0.0 is +0.0


@native
def float_of(integer: np.int32) -> np.float32:
    """The float that `ordered` turned into this integer."""
    value: np.float32 = _float32_of(_flip_negative(integer))
    return value


@native
def magnitude_bits(value: np.float32) -> np.int32:
    """The bits of abs(value): above INFINITY_BITS for a NaN, equal to it for an infinity."""
    return np.int32(_float32_bits(value) & np.int32(0x7FFFFFFF))


@native
def weight_of(x: float) -> int:
    """round(e**x * WEIGHT_SCALE) for x ≤ 0, within 1e-15 of e**x before rounding."""
    shifted = x * _LOG2_E + _ROUNDER
    n = shifted - _ROUNDER
    rest = (x - n * _LN2_HIGH) - n * _LN2_LOW
    value = _TAYLOR[0]
    for coefficient in _TAYLOR[1:]:
        value = value * rest + coefficient
    power = _float64_of((_float64_bits(shifted) + _SCALE_EXPONENT) << 52)
    rounded = _float64_bits(value * power + _ROUNDER) - _ROUNDER_BITS
    return rounded if x > LOWEST_X else 0
