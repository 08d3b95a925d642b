"""Causal attention over paged keys and values.

A tile is one key-value head of a run of a sequence's query tokens. Its rows are (token, head of the group) pairs,
token by token, so the number of keys that a row sees never falls from one row to the next:

    rows    | token t: group heads 0 .. g-1 | token t + 1: ... |

Keys go by in spans of 256 from position 0. For one span: scores of all rows by dot tiles, softmax row by row, weighted
values by accumulate tiles; then the span's (max, sum, output) is merged into the row's. A key and a value are thus
read once for the whole tile, where they lie. Spans start at fixed positions and merge in order, and a row takes part
in a span with the keys it sees only: its bits depend on its own query and context alone.

With a window w a row at position p sees the keys p - w + 1 .. p. Keys before them have weight 0, which changes no bit
of a sum, and spans that no row of a tile sees are left out.

With few tiles and long contexts the spans of a tile are tasks of their own, merged by a second launch: the same
arithmetic in the same order, on more threads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray
from numpy.typing import NDArray

from cluster.runtime.kernels.attention_softmax import softmax
from cluster.runtime.kernels.compiling import Record, Records, native, task_body
from cluster.runtime.kernels.dot_tiles import DOT_COLUMNS, DOT_ROWS, dot_tile
from cluster.runtime.kernels.emit import LANES, LINE_BYTES
from cluster.runtime.kernels.formats import BYTES_MASK
from cluster.runtime.kernels.simd import (
    address_of,
    broadcast,
    exp,
    float_pointer,
    fma,
    lane_max,
    load,
    load_int32,
    load_int64,
    load_part,
    prefetch,
    store,
    store_part,
)
from cluster.runtime.kernels.sum_tiles import SUM_ROWS, accumulate
from cluster.runtime.kernels.team import launch

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

SPAN = 256  # keys per span; a multiple of LANES
_TILE_ROWS = 48  # query rows of one tile: its scores of a span (48 KiB) stay in the second-level cache
_AHEAD_KEYS = 16  # to prefetch: a head's keys and values lie apart, and after a block's end they are elsewhere
_TASKS_PER_THREAD = 3  # with fewer tiles than this, spans become tasks
_ENTRY_BYTES = 40  # a row of _plan_tiles' result

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


class _Tile(NamedTuple):
    """The working memory of one tile."""

    query: FloatArray  # [num_rows, width], width = head_dim rounded up to whole vectors
    scores: FloatArray  # [num_rows, SPAN], then the softmax weights
    offsets: IntArray  # [SPAN] bytes from the layer's first key to each key of the span
    visible: IntArray  # [num_rows] keys of the span that the row sees


class _Output(NamedTuple):
    """Softmax output of some keys: not yet divided by the sum of the weights."""

    rows: FloatArray  # [num_rows, width]
    stats: FloatArray  # [num_rows, 2]: largest score, sum of exp(score - largest)


@native
def _new_output(num_rows: int, width: int) -> _Output:
    stats = np.zeros((num_rows, 2), np.float32)
    stats[:, 0] = -np.inf
    return _Output(np.zeros((num_rows, width), np.float32), stats)


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


@native
def _prefetch(place: int, num_bytes: int) -> None:
    for start in range(0, num_bytes, LINE_BYTES):
        prefetch(place + start)


@native
def _scores(a: Record, keys: int, values: int, tile: _Tile) -> None:
    """scores[row, key] for every row of the tile that sees the key; fetches the values for _weigh on the way."""
    query, offsets, visible = tile.query, tile.offsets, tile.visible
    num_rows, stride, num_bytes = query.shape[0], query.shape[1] * 4, a.head_dim * (a.stored & BYTES_MASK)
    last, row = visible[-1] - 1, 0
    for key in range(0, last + 1, DOT_COLUMNS):
        for later in range(key + _AHEAD_KEYS, min(key + _AHEAD_KEYS + DOT_COLUMNS, last + 1)):
            _prefetch(keys + offsets[later], num_bytes)
            _prefetch(values + offsets[later], num_bytes)
        while visible[row] <= key:
            row += 1
        k0, k1 = keys + offsets[key], keys + offsets[min(key + 1, last)]
        k2, k3 = keys + offsets[min(key + 2, last)], keys + offsets[min(key + 3, last)]
        for first in range(row, num_rows, DOT_ROWS):
            rows = min(DOT_ROWS, num_rows - first)
            x, out = address_of(query) + first * stride, address_of(tile.scores) + (first * SPAN + key) * 4
            dot_tile(a.stored, False, rows, x, stride, k0, k1, k2, k3, a.head_dim, out, SPAN * 4, 4, 0, 0)


@native
def _weigh(a: Record, values: int, tile: _Tile, output: _Output) -> None:
    """output[row] += sum of weights[row, key] * value[key] over the keys that the row sees."""
    num_rows, stride, visible = len(tile.visible), output.rows.shape[1] * 4, tile.visible
    for first in range(0, num_rows, SUM_ROWS):
        rows, common = min(SUM_ROWS, num_rows - first), visible[first]  # the first row of a group sees the fewest
        p, out = address_of(tile.scores) + first * SPAN * 4, address_of(output.rows) + first * stride
        places = address_of(tile.offsets)
        accumulate(a.stored, rows, p, SPAN * 4, places, values, common, out, stride, a.head_dim)
        for row in range(rows):
            rest = visible[first + row] - common
            p_row, out_row = p + (row * SPAN + common) * 4, out + row * stride
            accumulate(a.stored, 1, p_row, 0, places + 8 * common, values, rest, out_row, 0, a.head_dim)


@native
def _new_tile(a: Record, sequence: int, first_token: int, head: int) -> _Tile:
    """Working memory with the tile's queries in it."""
    group, row_end = a.num_heads // a.num_kv_heads, load_int32(a.query_start + 4 * sequence + 4)
    num_rows = min(a.tile_tokens, row_end - first_token) * group
    query = np.empty((num_rows, -(-a.head_dim // LANES) * LANES), np.float32)
    for row in range(num_rows):
        token, query_head = first_token + row // group, head * group + row % group
        source, target = a.query + token * a.query_stride + query_head * a.head_dim * 4, address_of(query[row])
        whole = a.head_dim & -LANES
        for index in range(0, whole, LANES):
            store(target + 4 * index, load(source + 4 * index))
        if whole < a.head_dim:
            store(target + 4 * whole, load_part(source + 4 * whole, a.head_dim - whole))
    scores = np.empty((num_rows, SPAN), np.float32)
    return _Tile(query, scores, np.empty(SPAN, np.int64), np.empty(num_rows, np.int64))


@native
def _attend_span(
    a: Record, sequence: int, first_token: int, head: int, span: int, tile: _Tile, output: _Output
) -> None:
    """One span's output; `output` holds zeros before."""
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


@native
def _merge(total: _Output, part: _Output) -> None:
    """Add the next span's output to what the spans before it gave."""
    width = total.rows.shape[1]
    for row in range(len(total.rows)):
        largest, weight_sum = part.stats[row, 0], part.stats[row, 1]
        if weight_sum == 0:
            continue  # the row sees no key of the span
        top = max(total.stats[row, 0], largest)
        keep, add = exp(broadcast(total.stats[row, 0] - top)), exp(broadcast(largest - top))
        target, source = address_of(total.rows[row]), address_of(part.rows[row])
        for index in range(0, 4 * width, 4 * LANES):
            store(target + index, fma(load(source + index), add, load(target + index) * keep))
        total.stats[row, 1] = total.stats[row, 1] * lane_max(keep) + weight_sum * lane_max(add)
        total.stats[row, 0] = top


@native
def _finish(a: Record, first_token: int, head: int, total: _Output) -> None:
    """Divide by the sums of the weights and store the rows."""
    group = a.num_heads // a.num_kv_heads
    for row in range(len(total.rows)):
        token, query_head = first_token + row // group, head * group + row % group
        target, source = a.out + (token * a.num_heads + query_head) * a.head_dim * 4, address_of(total.rows[row])
        weight_sum = broadcast(total.stats[row, 1])
        for index in range(0, a.head_dim, LANES):
            value = load(source + 4 * index) / weight_sum
            if index + LANES <= a.head_dim:
                store(target + 4 * index, value)
            else:
                store_part(target + 4 * index, value, a.head_dim - index)


@native
def _partial(a: Record, span: int, head: int, num_rows: int) -> _Output:
    """Where the output of one span of the step lies while spans are tasks."""
    width = -(-a.head_dim // LANES) * LANES
    base = a.partials + (span * a.num_kv_heads + head) * a.partial_rows * (width + 2) * 4
    stats = carray(float_pointer(base + num_rows * width * 4), (num_rows, 2))
    return _Output(carray(float_pointer(base), (num_rows, width)), stats)


@native
def _attend_tile(a: Record, entry: int, head: int) -> None:
    """All spans of one tile, one after the other."""
    sequence, first_token = load_int64(entry), load_int64(entry + 8)
    tile = _new_tile(a, sequence, first_token, head)
    total = _new_output(tile.query.shape[0], tile.query.shape[1])
    skipped = load_int64(entry + 32)
    for span in range(skipped, skipped + load_int64(entry + 24)):
        part = _new_output(tile.query.shape[0], tile.query.shape[1])
        _attend_span(a, sequence, first_token, head, span, tile, part)
        _merge(total, part)
    _finish(a, first_token, head, total)


@task_body(ATTENTION)
def _tile_task(args: Record, task: int) -> None:
    a = carray(args, 1)[0]
    num_groups = a.num_kv_heads // a.heads_per_task
    first, entry = task % num_groups * a.heads_per_task, a.tiles + task // num_groups * _ENTRY_BYTES
    for head in range(first, first + a.heads_per_task):
        _attend_tile(a, entry, head)


@task_body(ATTENTION)
def _span_task(args: Record, task: int) -> None:
    """One span of one tile, into its partial output."""
    a = carray(args, 1)[0]
    head, index = task % a.num_kv_heads, task // a.num_kv_heads
    entry = a.tiles + load_int64(a.spans + 8 * index) * _ENTRY_BYTES
    sequence, first_token, first_span = load_int64(entry), load_int64(entry + 8), load_int64(entry + 16)
    tile = _new_tile(a, sequence, first_token, head)
    part = _partial(a, index, head, tile.query.shape[0])
    part.rows[:] = 0
    part.stats[:, 0], part.stats[:, 1] = -np.inf, 0
    span = load_int64(entry + 32) + index - first_span
    _attend_span(a, sequence, first_token, head, span, tile, part)


@task_body(ATTENTION)
def _merge_task(args: Record, task: int) -> None:
    """Merge a tile's partial outputs in the order of the spans."""
    a = carray(args, 1)[0]
    head, entry = task % a.num_kv_heads, a.tiles + task // a.num_kv_heads * _ENTRY_BYTES
    sequence, first_token, first_span = load_int64(entry), load_int64(entry + 8), load_int64(entry + 16)
    row_end = load_int32(a.query_start + 4 * sequence + 4)
    num_rows = min(a.tile_tokens, row_end - first_token) * (a.num_heads // a.num_kv_heads)
    total = _new_output(num_rows, -(-a.head_dim // LANES) * LANES)
    for span in range(load_int64(entry + 24)):
        _merge(total, _partial(a, first_span + span, head, num_rows))
    _finish(a, first_token, head, total)


@native
def _plan_tiles(a: Record) -> IntArray:
    """[num_tiles, 5]: sequence, first query token (row of the batch), index of its first span, spans, spans before.

    The spans before are those that lie outside of every row's window.
    """
    starts, contexts = a.query_start, a.context_len
    count = 0
    for sequence in range(a.num_seqs):
        rows = load_int32(starts + 4 * sequence + 4) - load_int32(starts + 4 * sequence)
        count += -(-rows // a.tile_tokens)
    tiles = np.empty((count, 5), np.int64)
    index, num_spans = 0, 0
    for sequence in range(a.num_seqs):
        row_end = load_int32(starts + 4 * sequence + 4)
        for first in range(load_int32(starts + 4 * sequence), row_end, a.tile_tokens):
            before = load_int32(contexts + 4 * sequence) - row_end  # position of token t: before + t
            skipped = max(before + first + 1 - a.window, 0) // SPAN if a.window else 0
            num_keys = before + min(first + a.tile_tokens, row_end)
            tiles[index, 0], tiles[index, 1], tiles[index, 4] = sequence, first, skipped
            tiles[index, 2], tiles[index, 3] = num_spans, -(-num_keys // SPAN) - skipped
            num_spans += tiles[index, 3]
            index += 1
    return tiles


@native
def _launch_spans(team: int, args: Records, tiles: IntArray, spans: IntArray, partials: FloatArray) -> None:
    a = args[0]
    a.spans, a.partials = address_of(spans), address_of(partials)
    for index in range(len(tiles)):
        spans[tiles[index, 2] : tiles[index, 2] + tiles[index, 3]] = index
    launch(team, a.span_function, args, len(spans) * a.num_kv_heads)
    launch(team, a.merge_function, args, len(tiles) * a.num_kv_heads)


@native
def _launch_tiles(team: int, args: Records, tiles: IntArray) -> None:
    a = args[0]
    a.tiles = address_of(tiles)
    num_spans, num_tasks, wanted = (
        tiles[-1, 2] + tiles[-1, 3],
        len(tiles) * a.num_kv_heads,
        _TASKS_PER_THREAD * a.num_threads,
    )
    if num_spans == len(tiles) or num_tasks >= wanted:
        # a processor fetches what lies beside a head's keys as well, the other heads' keys: best for the same thread
        a.heads_per_task = a.num_kv_heads if len(tiles) >= wanted else 1
        launch(team, a.tile_function, args, num_tasks // a.heads_per_task)
        return
    a.partial_rows = a.tile_tokens * (a.num_heads // a.num_kv_heads)
    width = -(-a.head_dim // LANES) * LANES
    partials = np.empty(num_spans * a.num_kv_heads * a.partial_rows * (width + 2), np.float32)
    _launch_spans(team, args, tiles, np.empty(num_spans, np.int64), partials)


@native
def launch_attention(team: int, args: Records) -> None:
    """Attend for a whole step; args: one ATTENTION record, see the module's text for what is computed.

    keys and values are [num_blocks, block_size, num_kv_heads, head_dim]; a query token's heads lie side by side,
    query_stride bytes after the previous token's; out is [num_tokens, num_heads, head_dim].
    """
    a = args[0]
    a.tile_tokens = max(1, _TILE_ROWS // (a.num_heads // a.num_kv_heads))
    if load_int32(a.query_start + 4 * a.num_seqs):
        _launch_tiles(team, args, _plan_tiles(a))


def attention_functions() -> tuple[int, int, int]:
    """Addresses for the record's tile_function, span_function and merge_function."""
    return _tile_task.address, _span_task.address, _merge_task.address
