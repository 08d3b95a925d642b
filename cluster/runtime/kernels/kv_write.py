"""Storing a step's keys and values in their slots, as float32 or rounded to a 16-bit format (nearest even)."""

from __future__ import annotations

import numpy as np
from numba import carray

from cluster.runtime.kernels.compiling import Record, Records, native, task_body
from cluster.runtime.kernels.formats import BYTES_MASK, store_row
from cluster.runtime.kernels.simd import load_int64
from cluster.runtime.kernels.team import launch

KV_WRITE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "keys", "values", "layer_keys", "layer_values", "slots",  # addresses; slots int64 [num_tokens]
            "key_stride", "value_stride",  # bytes between the tokens of keys and values
            "num_tokens", "num_features", "stored",  # num_features: num_kv_heads * head_dim
            "function",
        )
    ]
)  # fmt: skip

_TOKENS_PER_TASK = 64


@task_body(KV_WRITE)
def _write_task(args: Record, task: int) -> None:
    a = carray(args, 1)[0]
    first = task * _TOKENS_PER_TASK
    for token in range(first, min(first + _TOKENS_PER_TASK, a.num_tokens)):
        place = load_int64(a.slots + 8 * token) * a.num_features * (a.stored & BYTES_MASK)
        store_row(a.keys + token * a.key_stride, a.layer_keys + place, a.num_features, a.stored)
        store_row(a.values + token * a.value_stride, a.layer_values + place, a.num_features, a.stored)


@native
def launch_kv_write(team: int, args: Records) -> None:
    """Write a step's keys and values; args: one KV_WRITE record."""
    a = args[0]
    launch(team, a.function, args, -(-a.num_tokens // _TOKENS_PER_TASK))


def kv_write_function() -> int:
    """Address for the record's function."""
    return _write_task.address
