"""Row-wise kernels: norms and the gated activation. Each row is worked through by one thread, in one order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from cluster.runtime.kernels.compiling import Record, native, task_body
from cluster.runtime.kernels.emit import LANES
from cluster.runtime.kernels.simd import broadcast, exp, fma, lane_sum, load, load_part, store, store_part
from cluster.runtime.kernels.team import launch

_VALUES_PER_TASK = 16 * 1024  # fewer are not worth another thread

_NORM = np.dtype(
    [(name, np.int64) for name in ("x", "weight", "out", "num_rows", "weight_rows", "features", "rows_per_task")]
    + [("eps", np.float64)]
)
_SILU = np.dtype([(name, np.int64) for name in ("gate_up", "out", "num_rows", "features", "rows_per_task")])


@native
def _square_sum(row: int, features: int) -> Any:
    whole = features & -LANES
    total = broadcast(np.float32(0))
    for index in range(0, 4 * whole, 4 * LANES):
        value = load(row + index)
        total = fma(value, value, total)
    if whole < features:
        value = load_part(row + 4 * whole, features - whole)
        total = fma(value, value, total)
    return lane_sum(total)


@native
def _norm_row(x: int, weight: int, out: int, features: int, eps: float) -> None:
    whole = features & -LANES
    mean = _square_sum(x, features) / np.float32(features)
    scale = broadcast(np.float32(1) / np.sqrt(mean + np.float32(eps)))
    for index in range(0, 4 * whole, 4 * LANES):
        store(out + index, load(x + index) * scale * load(weight + index))
    if whole < features:
        rest, index = features - whole, 4 * whole
        store_part(out + index, load_part(x + index, rest) * scale * load_part(weight + index, rest), rest)


@task_body(_NORM)
def _norm_task(args: Record, task: int) -> None:
    a = carray(args, 1)[0]
    first = task * a.rows_per_task
    for row in range(first, min(first + a.rows_per_task, a.num_rows)):
        place, weight = row * a.features * 4, a.weight + (row % a.weight_rows) * a.features * 4
        _norm_row(a.x + place, weight, a.out + place, a.features, a.eps)


@native
def launch_rms_norm(
    team: int, function: int, x: int, weight: int, out: int, num_rows: int, weight_rows: int, features: int, eps: float
) -> None:
    """out[i] = x[i] / sqrt(mean(x[i]**2) + eps) * weight[i % weight_rows]; float32 [num_rows, features] addresses."""
    args = np.empty(1, _NORM)
    a = args[0]
    a.x, a.weight, a.out, a.eps = x, weight, out, eps
    a.num_rows, a.weight_rows, a.features = num_rows, weight_rows, features
    a.rows_per_task = max(1, _VALUES_PER_TASK // features)
    launch(team, function, args, -(-num_rows // a.rows_per_task))


@native
def _gated_silu_row(gate: int, up: int, out: int, features: int) -> None:
    whole = features & -LANES
    one, zero = broadcast(np.float32(1)), broadcast(np.float32(0))
    for index in range(0, 4 * whole, 4 * LANES):
        value = load(gate + index)
        store(out + index, value / (one + exp(zero - value)) * load(up + index))
    if whole < features:
        rest, index = features - whole, 4 * whole
        value = load_part(gate + index, rest)
        store_part(out + index, value / (one + exp(zero - value)) * load_part(up + index, rest), rest)


@task_body(_SILU)
def _silu_task(args: Record, task: int) -> None:
    a = carray(args, 1)[0]
    first, row_bytes = task * a.rows_per_task, a.features * 4
    for row in range(first, min(first + a.rows_per_task, a.num_rows)):
        gate = a.gate_up + 2 * row * row_bytes
        _gated_silu_row(gate, gate + row_bytes, a.out + row * row_bytes, a.features)


@native
def launch_gated_silu(team: int, function: int, gate_up: int, out: int, num_rows: int, features: int) -> None:
    """out = silu(gate) * up; gate_up float32 [num_rows, 2 * features], gate first; out [num_rows, features]."""
    args = np.empty(1, _SILU)
    a = args[0]
    a.gate_up, a.out, a.num_rows, a.features = gate_up, out, num_rows, features
    a.rows_per_task = max(1, _VALUES_PER_TASK // features)
    launch(team, function, args, -(-num_rows // a.rows_per_task))


def rms_norm_function() -> int:
    """Address for launch_rms_norm."""
    return _norm_task.address


def gated_silu_function() -> int:
    """Address for launch_gated_silu."""
    return _silu_task.address
