"""Rotary position embedding of packed heads, in place."""

from __future__ import annotations

import numpy as np
from numba import carray

from cluster.runtime.kernels.compiling import Record, native, task_body
from cluster.runtime.kernels.emit import LANES
from cluster.runtime.kernels.simd import load, load_part, store, store_part
from cluster.runtime.kernels.team import launch

_ROTARY = np.dtype(
    [
        (name, np.int64)
        for name in (
            "heads", "table_rows",  # addresses
            "token_stride", "num_tokens", "num_heads", "head_dim",  # stride in bytes
            "tokens_per_task",
        )
    ]
)  # fmt: skip

_VALUES_PER_TASK = 16 * 1024  # fewer are not worth another thread


@native
def _rotate_head(head: int, cos: int, half: int) -> None:
    """head: two halves of `half` floats; cos: `half` cosines, then as many sines."""
    width = 4 * half  # bytes
    for index in range(0, half & -LANES, LANES):
        first, second = head + 4 * index, head + 4 * index + width
        a, b, c, s = load(first), load(second), load(cos + 4 * index), load(cos + 4 * index + width)
        store(first, a * c - b * s)
        store(second, b * c + a * s)
    rest = half & (LANES - 1)
    if rest:
        offset = width - 4 * rest
        first, second = head + offset, head + offset + width
        a, b = load_part(first, rest), load_part(second, rest)
        c, s = load_part(cos + offset, rest), load_part(cos + offset + width, rest)
        store_part(first, a * c - b * s, rest)
        store_part(second, b * c + a * s, rest)


@task_body(_ROTARY)
def _rotary_task(args: Record, task: int) -> None:
    a = carray(args, 1)[0]
    first = task * a.tokens_per_task
    for token in range(first, min(first + a.tokens_per_task, a.num_tokens)):
        heads, cos = a.heads + token * a.token_stride, a.table_rows + token * a.head_dim * 4
        for head in range(a.num_heads):
            _rotate_head(heads + head * a.head_dim * 4, cos, a.head_dim // 2)


@native
def launch_rotary(
    team: int,
    function: int,
    heads: int,
    table_rows: int,
    token_stride: int,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
) -> None:
    """Rotate the first num_heads heads of every token, float32, token_stride bytes apart.

    table_rows: float32 [num_tokens, head_dim], each token's cosines and then its sines.
    """
    args = np.empty(1, _ROTARY)
    a = args[0]
    a.heads, a.table_rows, a.token_stride = heads, table_rows, token_stride
    a.num_tokens, a.num_heads, a.head_dim = num_tokens, num_heads, head_dim
    a.tokens_per_task = max(1, _VALUES_PER_TASK // (num_heads * head_dim))
    launch(team, function, args, -(-num_tokens // a.tokens_per_task))


def rotary_function() -> int:
    """Address of the compiled task function, for launch_rotary."""
    return _rotary_task.address
