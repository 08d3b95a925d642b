"""Rows of a table by their numbers, as float32: token embeddings, rotary tables, the rows that are sampled."""

from __future__ import annotations

from cluster.runtime.kernels.compiling import native
from cluster.runtime.kernels.emit import LANES
from cluster.runtime.kernels.formats import BYTES_MASK, INT8, load_int8, load_int8_part, load_row
from cluster.runtime.kernels.simd import broadcast, load_float, load_int64, store, store_part


@native
def _scaled_row(source: int, scale: float, target: int, count: int) -> None:
    whole, factor = count & -LANES, broadcast(scale)
    for index in range(0, whole, LANES):
        store(target + 4 * index, load_int8(source + index) * factor)
    if whole < count:
        rest = count - whole
        store_part(target + 4 * whole, load_int8_part(source + whole, rest) * factor, rest)


@native
def gather_rows(table: int, scales: int, numbers: int, out: int, num_rows: int, features: int, stored: int) -> None:
    """out[i] = table[numbers[i]], times scales[numbers[i]] for int8.

    table [.., features], stored: its Format; scales float32 [..], of int8 only; numbers int64 [num_rows]; out float32
    [num_rows, features].
    """
    for row in range(num_rows):
        number, target = load_int64(numbers + 8 * row), out + 4 * row * features
        source = table + number * features * (stored & BYTES_MASK)
        if stored == INT8:
            _scaled_row(source, load_float(scales + 4 * number), target, features)
        else:
            load_row(source, target, features, stored)
