"""What threads need to meet: atomic words, sleeping on a word, and calling a task function by its address."""

from __future__ import annotations

import platform
import sys

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function

from cluster.runtime.kernels.emit import I32, I64, call_llvm, pointer
from cluster.runtime.kernels.simd import operation1, operation2, operation3

_address, _word = types.intp, types.int64
_ORDER = "seq_cst"  # everywhere: a launch costs a handful of these, and the proofs stay short


def _load(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.load_atomic(pointer(builder, address, I64), _ORDER, 8)


def _store(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    builder.store_atomic(value, pointer(builder, address, I64), _ORDER, 8)


def _add(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    return builder.atomic_rmw("add", pointer(builder, address, I64), value, _ORDER)


def _swap_if(builder: ir.IRBuilder, address: ir.Value, expected: ir.Value, new: ir.Value) -> ir.Value:
    result = builder.cmpxchg(pointer(builder, address, I64), expected, new, _ORDER, _ORDER)
    return builder.extract_value(result, 1)


atomic_load = operation1(_word, _address, _load)
atomic_store = operation2(types.void, _address, _word, _store)
atomic_add = operation2(_word, _address, _word, _add)  # returns the value before
swap_if = operation3(types.boolean, _address, _word, _word, _swap_if)  # did it hold `expected`, and so now `new`?


def _call_task(builder: ir.IRBuilder, function: ir.Value, args: ir.Value, task: ir.Value) -> None:
    body = ir.FunctionType(ir.VoidType(), [I64, I64])
    builder.call(builder.inttoptr(function, body.as_pointer()), [args, task])


call_task = operation3(types.void, _address, _address, _word, _call_task)


def _pause(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Tell the core that this is a spin loop."""
    if platform.machine() in ("x86_64", "AMD64"):
        call_llvm(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif platform.machine() in ("aarch64", "arm64"):
        call_llvm(builder, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(I32, 1))  # yield
    return value


pause = operation1(_word, _word, _pause)

# futex(2): the kernel compares the word again before it sleeps, so that no wake-up is lost.
_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
_FUTEX = _FUTEX_NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129
_NAP_US = 50  # where there is no futex, waiters look again this often


def _futex(builder: ir.IRBuilder, address: ir.Value, operation: int, value: ir.Value) -> None:
    system_call = get_or_insert_function(builder.module, ir.FunctionType(I64, [I64] * 7), "syscall")
    numbers = [ir.Constant(I64, _FUTEX), address, ir.Constant(I64, operation), value, *[ir.Constant(I64, 0)] * 3]
    builder.call(system_call, numbers)


def _sleep_while(builder: ir.IRBuilder, address: ir.Value, expected: ir.Value) -> None:
    if _FUTEX is not None:
        _futex(builder, address, _FUTEX_WAIT_PRIVATE, expected)
        return
    nap = get_or_insert_function(builder.module, ir.FunctionType(I32, [I32]), "usleep")
    builder.call(nap, [ir.Constant(I32, _NAP_US)])


def _wake(builder: ir.IRBuilder, address: ir.Value, count: ir.Value) -> None:
    if _FUTEX is not None:
        _futex(builder, address, _FUTEX_WAKE_PRIVATE, count)


sleep_while = operation2(types.void, _address, _word, _sleep_while)  # may return early; the 32-bit word == expected
wake = operation2(types.void, _address, _word, _wake)  # up to `count` sleepers on the 32-bit word
