"""A numba type of sixteen float32 lanes, with the loads, stores and arithmetic that kernels are written in.

Addresses are plain integers (bytes). Nothing here needs alignment. On hardware with narrower registers LLVM splits the
vectors; the results are the same bits, since every operation is lane-wise and each reduction has one fixed tree.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, overload, register_model
from numpy.typing import NDArray

from cluster.runtime.kernels.compiling import native
from cluster.runtime.kernels.emit import (
    F32,
    I32,
    I64,
    V16F32,
    emit_broadcast,
    emit_exp,
    emit_fma,
    emit_largest,
    emit_load,
    emit_load_bf16,
    emit_load_bf16_part,
    emit_load_part,
    emit_max,
    emit_prefetch,
    emit_store,
    emit_store_bf16,
    emit_store_bf16_part,
    emit_store_part,
    emit_sum,
    pointer,
)


class _Float32x16(types.Type):  # type: ignore[misc]
    """Sixteen float32 lanes in one register."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


float32x16 = _Float32x16()


@register_model(_Float32x16)
class _Float32x16Model(models.PrimitiveModel):  # type: ignore[misc]
    """Tells numba how the type is held."""

    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, V16F32)


def _implement(emit: Callable[..., ir.Value], result: Any) -> Callable[..., Any]:
    def generate(context: Any, builder: ir.IRBuilder, _: Any, values: Sequence[ir.Value]) -> ir.Value:
        value = emit(builder, *values)
        return context.get_dummy_value() if result is types.void else value

    return generate


def operation1(result: Any, first: Any, emit: Callable[..., ir.Value]) -> Any:
    """A kernel function of one argument from the code that `emit(builder, value)` writes."""
    return intrinsic(lambda context, a: (result(first), _implement(emit, result)))


def operation2(result: Any, first: Any, second: Any, emit: Callable[..., ir.Value]) -> Any:
    """A kernel function of two arguments."""
    return intrinsic(lambda context, a, b: (result(first, second), _implement(emit, result)))


def operation3(result: Any, first: Any, second: Any, third: Any, emit: Callable[..., ir.Value]) -> Any:
    """A kernel function of three arguments."""
    return intrinsic(lambda context, a, b, c: (result(first, second, third), _implement(emit, result)))


_vector, _address, _float = float32x16, types.intp, types.float32

load = operation1(_vector, _address, emit_load)
load_part = operation2(_vector, _address, _address, emit_load_part)
load_bf16 = operation1(_vector, _address, emit_load_bf16)
load_bf16_part = operation2(_vector, _address, _address, emit_load_bf16_part)
store = operation2(types.void, _address, _vector, emit_store)
store_part = operation3(types.void, _address, _vector, _address, emit_store_part)
store_bf16 = operation2(types.void, _address, _vector, emit_store_bf16)
store_bf16_part = operation3(types.void, _address, _vector, _address, emit_store_bf16_part)
load_float = operation1(_float, _address, lambda builder, a: builder.load(pointer(builder, a, F32), align=4))
store_float = operation2(types.void, _address, _float, emit_store)
load_int32 = operation1(types.int32, _address, lambda builder, a: builder.load(pointer(builder, a, I32), align=4))
load_int64 = operation1(types.int64, _address, lambda builder, a: builder.load(pointer(builder, a, I64), align=8))
float_pointer = operation1(types.CPointer(_float), _address, lambda builder, a: pointer(builder, a, F32))

prefetch = operation1(types.void, _address, emit_prefetch)

broadcast = operation1(_vector, _float, emit_broadcast)
fma = operation3(_vector, _vector, _vector, _vector, emit_fma)
maximum = operation2(_vector, _vector, _vector, emit_max)
exp = operation1(_vector, _vector, emit_exp)
lane_sum = operation1(_float, _vector, emit_sum)
lane_max = operation1(_float, _vector, emit_largest)


def _overload_operator(symbol: Any, operation: Any) -> None:
    def is_vector(a: Any, b: Any) -> bool:
        return a is float32x16 and b is float32x16

    # lambdas, since numba wants the two signatures equal down to their (absent) annotations
    overload(symbol)(lambda a, b: (lambda a, b: operation(a, b)) if is_vector(a, b) else None)


_overload_operator(operator.add, operation2(_vector, _vector, _vector, lambda builder, a, b: builder.fadd(a, b)))
_overload_operator(operator.sub, operation2(_vector, _vector, _vector, lambda builder, a, b: builder.fsub(a, b)))
_overload_operator(operator.mul, operation2(_vector, _vector, _vector, lambda builder, a, b: builder.fmul(a, b)))
_overload_operator(operator.truediv, operation2(_vector, _vector, _vector, lambda builder, a, b: builder.fdiv(a, b)))


@native
def address_of(array: NDArray[Any]) -> int:
    """Address of an array's first element; whoever uses it must hold the array longer than the address."""
    return np.int64(array.ctypes.data)  # type: ignore[return-value]
