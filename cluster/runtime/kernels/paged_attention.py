"""Causal attention over paged keys and values.

A tile is one key-value head of a run of a sequence's query tokens. Its rows are (token, head of the group) pairs,
token by token, so the number of keys that a row sees never falls from one row to the next:

    rows    | token t: group heads 0 .. g-1 | token t + 1: ... |

Keys go by in spans of 256 from position 0 (attention_tile), and each span's (max, sum, output) is merged into the
row's. Spans start at fixed positions and merge in order, and a row takes part in a span with the keys it sees only: its
bits depend on its own query and context alone.

With a window w a row at position p sees the keys p - w + 1 .. p. Keys before them have weight 0, which changes no bit
of a sum, and spans that no row of a tile sees are left out.

With few tiles and long contexts the spans of a tile are tasks of their own, merged by a second launch: the same
arithmetic in the same order, on more threads.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from cluster.runtime.kernels.attention_tile import (
    ATTENTION,
    SPAN,
    FloatArray,
    IntArray,
    Output,
    Tile,
    attend_span,
    load_queries,
    new_output,
    new_tile,
)
from cluster.runtime.kernels.compiling import Record, Records, native, task_body
from cluster.runtime.kernels.emit import LANES
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
    store,
    store_part,
)
from cluster.runtime.kernels.team import launch

_TILE_ROWS = 48  # query rows of one tile: its scores of a span (48 KiB) stay in the second-level cache
_TASKS_PER_THREAD = 3  # with fewer tiles than this, spans become tasks
_ENTRY_BYTES = 40  # a row of _plan_tiles' result


@native
def _merge(total: Output, part: Output) -> None:
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
def _finish(a: Record, first_token: int, head: int, total: Output) -> None:
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
def _partial(a: Record, span: int, head: int, num_rows: int) -> Output:
    """Where the output of one span of the step lies while spans are tasks."""
    width = -(-a.head_dim // LANES) * LANES
    base = a.partials + (span * a.num_kv_heads + head) * a.partial_rows * (width + 2) * 4
    stats = carray(float_pointer(base + num_rows * width * 4), (num_rows, 2))
    return Output(carray(float_pointer(base), (num_rows, width)), stats)


@native
def _attend_tile(a: Record, entry: int, head: int, tile: Tile) -> None:
    """All spans of one tile, one after the other."""
    sequence, first_token = load_int64(entry), load_int64(entry + 8)
    load_queries(a, first_token, head, tile.query)
    total = new_output(tile.query.shape[0], tile.query.shape[1])
    skipped = load_int64(entry + 32)
    for span in range(skipped, skipped + load_int64(entry + 24)):
        part = new_output(tile.query.shape[0], tile.query.shape[1])
        attend_span(a, sequence, first_token, head, span, tile, part)
        _merge(total, part)
    _finish(a, first_token, head, total)


@task_body(ATTENTION)
def _tile_task(args: Record, task: int) -> None:
    a = carray(args, 1)[0]
    num_groups = a.num_kv_heads // a.heads_per_task
    first, entry = task % num_groups * a.heads_per_task, a.tiles + task // num_groups * _ENTRY_BYTES
    tile = new_tile(a, load_int64(entry), load_int64(entry + 8))
    for head in range(first, first + a.heads_per_task):
        _attend_tile(a, entry, head, tile)


@task_body(ATTENTION)
def _span_task(args: Record, task: int) -> None:
    """One span of one tile, into its partial output."""
    a = carray(args, 1)[0]
    head, index = task % a.num_kv_heads, task // a.num_kv_heads
    entry = a.tiles + load_int64(a.spans + 8 * index) * _ENTRY_BYTES
    sequence, first_token, first_span = load_int64(entry), load_int64(entry + 8), load_int64(entry + 16)
    tile = new_tile(a, sequence, first_token)
    load_queries(a, first_token, head, tile.query)
    part = _partial(a, index, head, tile.query.shape[0])
    part.rows[:] = 0
    part.stats[:, 0], part.stats[:, 1] = -np.inf, 0
    span = load_int64(entry + 32) + index - first_span
    attend_span(a, sequence, first_token, head, span, tile, part)


@task_body(ATTENTION)
def _merge_task(args: Record, task: int) -> None:
    """Merge a tile's partial outputs in the order of the spans."""
    a = carray(args, 1)[0]
    head, entry = task % a.num_kv_heads, a.tiles + task // a.num_kv_heads * _ENTRY_BYTES
    sequence, first_token, first_span = load_int64(entry), load_int64(entry + 8), load_int64(entry + 16)
    row_end = load_int32(a.query_start + 4 * sequence + 4)
    num_rows = min(a.tile_tokens, row_end - first_token) * (a.num_heads // a.num_kv_heads)
    total = new_output(num_rows, -(-a.head_dim // LANES) * LANES)
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
