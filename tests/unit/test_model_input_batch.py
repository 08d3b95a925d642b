"""A step flattened into rows, slots and samples."""

from __future__ import annotations

import pytest
import torch

from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.messages.request import SamplingParams
from cluster.runtime.input_batch import InputBatch

pytestmark = pytest.mark.unit

PARAMS = SamplingParams(max_tokens=4, seed=9, temperature=0.5)


def build(*items: ScheduledSequence) -> InputBatch:
    return InputBatch.build(SchedulerOutput(items), block_size=4)


def test_prefill_decode_and_verification_rows_lie_side_by_side() -> None:
    batch = build(
        ScheduledSequence("chunk", (10, 11, 12), 0, (7,), 0, PARAMS),
        ScheduledSequence("decode", (20,), 5, (3, 9), 1, PARAMS),
        ScheduledSequence("verify", (30, 31, 32), 6, (1, 2, 8), 3, PARAMS, num_draft_tokens=2),
    )
    assert batch.token_ids.tolist() == [10, 11, 12, 20, 30, 31, 32]
    assert batch.positions.tolist() == [0, 1, 2, 5, 6, 7, 8]
    assert batch.slot_mapping.tolist() == [28, 29, 30, 9 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 8 * 4]
    assert batch.query_start.tolist() == [0, 3, 4, 7]
    assert batch.context_len.tolist() == [3, 6, 9]
    assert batch.block_table.tolist() == [[7, 0, 0], [3, 9, 0], [1, 2, 8]]
    assert batch.sample_rows.tolist() == [3, 4, 5, 6]
    assert batch.sampling.position.tolist() == [6, 7, 8, 9]
    assert (batch.num_tokens, batch.num_samples, batch.max_query_len, batch.max_context_len) == (7, 4, 3, 9)


def test_the_types_are_those_that_kernels_index_with() -> None:
    batch = build(ScheduledSequence("a", (1, 2), 0, (0,), 1, PARAMS))
    assert {batch.token_ids.dtype, batch.positions.dtype, batch.slot_mapping.dtype} == {torch.int64}
    assert {batch.query_start.dtype, batch.context_len.dtype, batch.block_table.dtype} == {torch.int32}
    assert batch.block_table.numpy().base is not None  # shared with the host arrays, not copied
    assert batch.host.block_table.ctypes.data == batch.block_table.data_ptr()


def test_an_empty_step_is_an_empty_batch() -> None:
    batch = build()
    assert (batch.num_tokens, batch.num_samples, batch.max_context_len) == (0, 0, 0)
    assert batch.query_start.tolist() == [0]
