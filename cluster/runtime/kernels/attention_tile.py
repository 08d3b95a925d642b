"""One span of keys for one tile of queries: scores, softmax weights, weighted values.

Blocks of keys are turned to lie side by side and summed to the scores of all rows, then come softmax row by row and the
sums of values. A key and a value are thus read once for the whole tile, where they lie.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.runtime.kernels.attention_softmax import softmax
from cluster.runtime.kernels.compiling import Record, native
from cluster.runtime.kernels.emit import LANES, LINE_BYTES
from cluster.runtime.kernels.formats import BYTES_MASK, FLOAT32, load_row
from cluster.runtime.kernels.key_blocks import KEY_BLOCK, turn_keys, turned_rows, widen_values
from cluster.runtime.kernels.simd import address_of, broadcast, load_int32, prefetch, store
from cluster.runtime.kernels.sum_tiles import SUM_ROWS, accumulate

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

SPAN = 256  # keys per span; a multiple of KEY_BLOCK
_MANY_ROWS = 12  # from which on a tile's values are widened once for all of its rows

ATTENTION = np.dtype(
    [
        (name, np.int64)
        for name in (
            "query", "keys", "values", "out",  # addresses; query and out are float32
            "block_table", "query_start", "context_len",  # addresses of int32
            "query_stride", "token_stride", "table_stride",  # bytes
            "num_seqs", "num_heads", "num_kv_heads", "head_dim", "block_size", "stored",  # their Format
            "window",  # keys that a row sees; 0: all
            "tile_function", "span_function", "merge_function", "num_threads",
            # filled in by launch_attention
            "tile_tokens", "heads_per_task", "tiles", "spans", "partials", "partial_rows",
        )
    ]
    + [("scale", np.float64), ("softcap", np.float64)]  # softcap 0: none
)  # fmt: skip


class Tile(NamedTuple):
    """The working memory of one tile."""

    query: FloatArray  # [num_rows, width], width = head_dim rounded up to whole vectors
    scores: FloatArray  # [num_rows, SPAN], then the softmax weights
    turned: FloatArray  # [features, KEY_BLOCK] of some keys
    widened: FloatArray  # [KEY_BLOCK, width]: some values; empty where rows are too few for that to pay
    offsets: IntArray  # [SPAN] bytes from the layer's first key to each key of the span, then to the last one again
    feature_offsets: IntArray  # [features] bytes from `turned` to each row
    value_offsets: IntArray  # [KEY_BLOCK] bytes from `widened` to each row
    visible: IntArray  # [num_rows] keys of the span that the row sees


class Output(NamedTuple):
    """Softmax output of some keys: not yet divided by the sum of the weights."""

    rows: FloatArray  # [num_rows, width]
    stats: FloatArray  # [num_rows, 2]: largest score, sum of exp(score - largest)


@native
def new_output(num_rows: int, width: int) -> Output:
    stats = np.zeros((num_rows, 2), np.float32)
    stats[:, 0] = -np.inf
    return Output(np.zeros((num_rows, width), np.float32), stats)


@native
def _key_offsets(table: int, block_size: int, token_stride: int, start: int, count: int, offsets: IntArray) -> None:
    index = 0
    while index < count:
        position = start + index
        inside = position % block_size
        slot = load_int32(table + 4 * (position // block_size)) * block_size + inside
        run = min(block_size - inside, count - index)
        for step in range(run):
            offsets[index + step] = (slot + step) * token_stride
        index += run
    offsets[count : -(-count // LANES) * LANES] = offsets[count - 1]


@native
def _prefetch(place: int, num_bytes: int) -> None:
    for start in range(0, num_bytes, LINE_BYTES):
        prefetch(place + start)


@native
def _clear(scores: int) -> None:
    """A row's scores of one block."""
    for index in range(0, 4 * KEY_BLOCK, 4 * LANES):
        store(scores + index, broadcast(np.float32(0)))


@native
def _turn_block(a: Record, keys: int, values: int, first: int, count: int, tile: Tile) -> None:
    """A block of keys into `turned`; begins to fetch the keys after them, and the values for _weigh."""
    offsets, num_bytes = tile.offsets, a.head_dim * (a.stored & BYTES_MASK)
    for key in range(first, min(first + KEY_BLOCK, count), LANES):
        for later in range(key + LANES, min(key + 2 * LANES, count)):
            _prefetch(keys + offsets[later], num_bytes)
            _prefetch(values + offsets[later], num_bytes)
        out = address_of(tile.turned) + 4 * (key - first)
        turn_keys(a.stored, keys, address_of(offsets) + 8 * key, a.head_dim, out)


@native
def _scores(a: Record, keys: int, values: int, tile: Tile) -> None:
    """scores[row, key] for every row of the tile that sees the key."""
    query, scores, visible = tile.query, tile.scores, tile.visible
    num_rows, stride, count, row = query.shape[0], query.shape[1] * 4, visible[-1], 0
    for first in range(0, count, KEY_BLOCK):
        _turn_block(a, keys, values, first, count, tile)
        while visible[row] <= first:
            row += 1
        for start in range(row, num_rows):
            _clear(address_of(scores) + (start * SPAN + first) * 4)
        for start in range(row, num_rows, SUM_ROWS):
            accumulate(
                FLOAT32, min(SUM_ROWS, num_rows - start), address_of(query) + start * stride, stride,
                address_of(tile.feature_offsets), address_of(tile.turned), a.head_dim,
                address_of(scores) + (start * SPAN + first) * 4, SPAN * 4, KEY_BLOCK,
            )  # fmt: skip


@native
def _weigh(a: Record, values: int, tile: Tile, output: Output) -> None:
    """output[row] += sum of weights[row, key] * value[key] over the keys that the row sees."""
    if len(tile.widened) == 0:
        _weigh_some(a, a.stored, values, address_of(tile.offsets), 0, SPAN, tile, output)
        return
    count, width = tile.visible[-1], tile.widened.shape[1] * 4
    for first in range(0, count, KEY_BLOCK):
        here = min(KEY_BLOCK, count - first)
        places, out = address_of(tile.offsets) + 8 * first, address_of(tile.widened)
        widen_values(a.stored, values, places, here, a.head_dim, out, width)
        _weigh_some(a, FLOAT32, out, address_of(tile.value_offsets), first, here, tile, output)


@native
def _weigh_some(
    a: Record, stored: int, values: int, places: int, start: int, count: int, tile: Tile, output: Output
) -> None:
    """_weigh for the keys from `start` on, whose values lie at `places`."""
    num_rows, stride, visible = len(tile.visible), output.rows.shape[1] * 4, tile.visible
    for first in range(0, num_rows, SUM_ROWS):
        rows = min(SUM_ROWS, num_rows - first)
        common = min(max(visible[first] - start, 0), count)  # the first row of a group sees the fewest
        p, out = address_of(tile.scores) + (first * SPAN + start) * 4, address_of(output.rows) + first * stride
        accumulate(stored, rows, p, SPAN * 4, places, values, common, out, stride, a.head_dim)
        for row in range(rows):
            rest = min(max(visible[first + row] - start, 0), count) - common
            p_row, out_row = p + (row * SPAN + common) * 4, out + row * stride
            accumulate(stored, 1, p_row, 0, places + 8 * common, values, rest, out_row, 0, a.head_dim)


@native
def new_tile(a: Record, sequence: int, first_token: int) -> Tile:
    """Working memory for the heads of a tile, one after the other."""
    row_end, width = load_int32(a.query_start + 4 * sequence + 4), -(-a.head_dim // LANES) * LANES
    num_rows = min(a.tile_tokens, row_end - first_token) * (a.num_heads // a.num_kv_heads)
    return Tile(
        np.empty((num_rows, width), np.float32),
        np.empty((num_rows, SPAN), np.float32),
        np.zeros((turned_rows(a.head_dim), KEY_BLOCK), np.float32),  # columns of no key are multiplied, too
        np.empty((KEY_BLOCK if num_rows >= _MANY_ROWS else 0, width), np.float32),
        np.empty(SPAN, np.int64),
        np.arange(0, 4 * KEY_BLOCK * a.head_dim, 4 * KEY_BLOCK),
        np.arange(0, 4 * KEY_BLOCK * width, 4 * width),
        np.empty(num_rows, np.int64),
    )


@native
def load_queries(a: Record, first_token: int, head: int, query: FloatArray) -> None:
    """The queries of one key-value head's group."""
    group = a.num_heads // a.num_kv_heads
    for row in range(len(query)):
        token, query_head = first_token + row // group, head * group + row % group
        source = a.query + token * a.query_stride + query_head * a.head_dim * 4
        load_row(source, address_of(query[row]), a.head_dim, FLOAT32)


@native
def attend_span(a: Record, sequence: int, first_token: int, head: int, span: int, tile: Tile, output: Output) -> None:
    """One span's output for the tile's queries; `output` holds zeros before."""
    num_rows, group, start = len(tile.visible), a.num_heads // a.num_kv_heads, span * SPAN
    row_end = load_int32(a.query_start + 4 * sequence + 4)
    first_visible = load_int32(a.context_len + 4 * sequence) - row_end + first_token + 1
    for row in range(num_rows):
        tile.visible[row] = min(max(first_visible + row // group - start, 0), SPAN)
    table = a.block_table + sequence * a.table_stride
    _key_offsets(table, a.block_size, a.token_stride, start, tile.visible[-1], tile.offsets)
    head_offset, scale, softcap = (
        head * a.head_dim * (a.stored & BYTES_MASK),
        np.float32(a.scale),
        np.float32(a.softcap),
    )
    _scores(a, a.keys + head_offset, a.values + head_offset, tile)
    for row in range(num_rows):
        if tile.visible[row]:
            hidden = max(first_visible + row // group - a.window - start, 0) if a.window else 0
            largest, weight_sum = softmax(tile.scores[row], hidden, tile.visible[row], scale, softcap)
            output.stats[row, 0], output.stats[row, 1] = largest, weight_sum
    _weigh(a, a.values + head_offset, tile, output)
