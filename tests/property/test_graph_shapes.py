"""The shape that a step is padded to, and what the padding reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.messages.request import SamplingParams
from cluster.runtime.graph_shapes import MAX_QUERY_LEN, Eager, GraphShape, GraphShapes
from cluster.runtime.input_batch import CPU, InputBatch
from cluster.runtime.kv_store import KVCache
from cluster.runtime.static_batch import StaticBatches
from tests.unit.test_model_kv_store import SPEC

pytestmark = pytest.mark.property

BLOCK_SIZE, MAX_LEN, NUM_BLOCKS = 4, 64, 200
limits = st.builds(
    GraphShapes.of, st.integers(0, 70), st.integers(0, 600), st.integers(1, 200), st.sampled_from([1, 16, 256])
)
lengths = st.lists(st.integers(1, MAX_QUERY_LEN + 2), min_size=1, max_size=70)


def fit(shapes: GraphShapes, rows: Sequence[int]) -> GraphShape | Eager:
    return shapes.fit(len(rows), sum(rows), max(rows), table_width=1)


@given(limits, lengths)
def test_a_step_gets_the_smallest_shape_that_holds_it_or_a_reason(shapes: GraphShapes, rows: list[int]) -> None:
    def holds(shape: GraphShape) -> bool:
        missing = shape.num_seqs - len(rows)
        return missing >= 0 and sum(rows) + missing <= shape.num_tokens and max(rows) <= shape.max_query_len

    chosen = fit(shapes, rows)
    if isinstance(chosen, GraphShape):
        assert holds(chosen)
        assert not any(holds(shape) and shape.num_tokens < chosen.num_tokens for shape in shapes.shapes)
    elif chosen is Eager.PREFILL:
        assert max(rows) > MAX_QUERY_LEN
    else:
        assert chosen is Eager.TOO_LARGE
        assert not any(holds(shape) for shape in shapes.shapes)


@given(limits, lengths)
def test_one_more_row_or_sequence_never_needs_a_smaller_shape(shapes: GraphShapes, rows: list[int]) -> None:
    def size(rows: list[int]) -> float:
        chosen = fit(shapes, rows)
        return chosen.num_tokens if isinstance(chosen, GraphShape) else float("inf")

    assert size([*rows, 1]) >= size(rows)
    assert size([rows[0] + 1, *rows[1:]]) >= size(rows)


@given(limits)
def test_shapes_are_few_distinct_and_captured_from_the_largest(shapes: GraphShapes) -> None:
    sizes = [shape.num_tokens for shape in shapes.capture_order]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(shapes.shapes)) == len(shapes.shapes) <= 8 * 8


@given(st.integers(1, 64), st.integers(0, 5))
def test_every_decode_and_verification_of_the_default_pool_has_a_shape(num_seqs: int, guesses: int) -> None:
    shapes = GraphShapes.of(max_num_seqs=64, max_num_tokens=512, max_model_len=8192, block_size=256)
    rows = [guesses + 1] * num_seqs
    chosen = fit(shapes, rows)
    assert isinstance(chosen, GraphShape) == (sum(rows) <= 384)  # 64 sequences have 4 rows, 6 would be 384, 9 too many
    if isinstance(chosen, GraphShape):
        assert chosen.num_tokens <= 2 * num_seqs * -(-sum(rows) * 6 // (5 * num_seqs))


def test_a_longer_block_table_than_foreseen_is_a_reason() -> None:
    shapes = GraphShapes.of(4, 64, MAX_LEN, BLOCK_SIZE)
    assert shapes.fit(1, 1, 1, table_width=MAX_LEN // BLOCK_SIZE) == GraphShape(1, 1)
    assert shapes.fit(1, 1, 1, table_width=MAX_LEN // BLOCK_SIZE + 1) is Eager.LONG_TABLE


@st.composite
def steps(draw: st.DrawFn) -> SchedulerOutput:
    """Decode and verification rows of sequences whose blocks are their own."""
    free, items = list(range(NUM_BLOCKS)), []
    for index in range(draw(st.integers(1, 9))):
        num_rows = draw(st.integers(1, 6))
        start = draw(st.integers(0, MAX_LEN - num_rows))
        table = tuple(free.pop() for _ in range(-(-(start + num_rows) // BLOCK_SIZE)))
        samples = draw(st.integers(0, num_rows))
        tokens = tuple(draw(st.lists(st.integers(1, 90), min_size=num_rows, max_size=num_rows)))
        sampling = SamplingParams(max_tokens=1, seed=0)
        items.append(ScheduledSequence(f"r{index}", tokens, start, table, samples, sampling))
    return SchedulerOutput(tuple(items))


SHAPES = GraphShapes.of(12, 80, MAX_LEN, BLOCK_SIZE)
KV = KVCache.allocate(SPEC, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU, has_padding_block=True)
STATIC = StaticBatches.allocate(SHAPES, KV, CPU)


@given(steps(), steps())
def test_a_padded_step_is_the_step_and_rows_that_touch_the_padding_block_only(
    before: SchedulerOutput, step: SchedulerOutput
) -> None:
    plain = InputBatch.build(step, BLOCK_SIZE)
    shape = fit(SHAPES, np.diff(plain.host.query_start).tolist())
    assert isinstance(shape, GraphShape)
    padded = STATIC.batch(shape)
    earlier = InputBatch.build(before, BLOCK_SIZE).host
    other = fit(SHAPES, np.diff(earlier.query_start).tolist())
    assert isinstance(other, GraphShape)
    STATIC.load(earlier, STATIC.batch(other))  # leaves nothing behind
    STATIC.load(plain.host, padded)

    num_rows, num_seqs = plain.num_tokens, len(plain.context_len)
    for name in ("token_ids", "positions", "slot_mapping", "context_len", "block_table", "query_start"):
        own = getattr(plain, name)
        assert torch.equal(getattr(padded, name)[tuple(map(slice, own.shape))], own)
    assert torch.equal(padded.sample_rows[: plain.num_samples], plain.sample_rows)

    assert padded.token_ids.shape == padded.sample_rows.shape == (shape.num_tokens,)
    assert set((padded.slot_mapping[num_rows:] // BLOCK_SIZE).tolist()) <= {KV.padding_block}
    assert set(padded.block_table[num_seqs:].flatten().tolist()) <= {KV.padding_block}
    assert set(padded.context_len[num_seqs:].tolist()) <= {1}
    assert not padded.block_table[:num_seqs, plain.block_table.shape[1] :].any()
    assert set(padded.query_start.diff()[num_seqs:].tolist()) <= {1}
    assert padded.query_start[-1] <= shape.num_tokens
    assert padded.positions.max() < MAX_LEN
    assert padded.max_query_len >= plain.max_query_len
    assert padded.max_context_len >= plain.max_context_len
    for name in ("query_start", "context_len", "block_table", "token_ids", "positions", "slot_mapping", "sample_rows"):
        copied, host = getattr(padded, name), getattr(padded.host, name)
        assert copied.tolist() == host.tolist()
        assert copied.dtype == getattr(plain, name).dtype
        assert copied.data_ptr() != host.ctypes.data
