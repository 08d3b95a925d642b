"""Attention on CUDA agrees with the torch reference."""

from __future__ import annotations

import pytest
import torch

from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.messages.request import SamplingParams
from cluster.runtime.attention import make_attention
from cluster.runtime.attention.cuda import CudaAttention
from cluster.runtime.attention.reference import ReferenceAttention
from cluster.runtime.input_batch import InputBatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BLOCK_SIZE = 256  # FlashAttention 2 wants pages of a multiple of 256 tokens


def ragged_batch() -> InputBatch:
    sampling = SamplingParams(max_tokens=1, seed=0)
    items = (
        ScheduledSequence("prefill", (1,) * 300, 0, (3, 1), 0, sampling),
        ScheduledSequence("decode", (1,), 700, (0, 5, 2), 0, sampling),
        ScheduledSequence("verify", (1,) * 5, 250, (4,), 0, sampling),
    )
    return InputBatch.build(SchedulerOutput(items), BLOCK_SIZE, torch.device("cuda"))


def assert_agrees(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: InputBatch) -> None:
    """With the reference, within what 16 bits can tell."""
    expected = ReferenceAttention().attend(query.float(), keys, values, batch)
    actual = CudaAttention().attend(query, keys, values, batch)
    torch.testing.assert_close(actual.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("heads", [(8, 2, 128), (9, 3, 64), (4, 4, 64), (4, 2, 12), (2, 1, 264)], ids=str)
def test_a_ragged_batch_agrees_with_the_reference(heads: tuple[int, int, int]) -> None:
    batch = ragged_batch()
    shape = (6, BLOCK_SIZE, *heads[1:])
    keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn((batch.num_tokens, heads[0], heads[2]), device="cuda", dtype=torch.bfloat16)
    assert_agrees(query, keys, values, batch)


def test_few_rows_over_long_contexts_agree_with_the_reference() -> None:
    """Where the kernel would split a sequence's keys if it were let, and give wrong rows."""
    batch = decode_batch(num_seqs=2, context_len=4000)
    keys, values = (torch.randn((32, BLOCK_SIZE, 1, 64), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn((2, 4, 64), device="cuda", dtype=torch.bfloat16)
    assert_agrees(query, keys, values, batch)


def test_a_rows_bits_do_not_depend_on_the_batch() -> None:
    batch = decode_batch(num_seqs=32, context_len=3000)
    keys, values = (torch.randn((12, BLOCK_SIZE, 2, 64), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn((1, 8, 64), device="cuda", dtype=torch.bfloat16)
    crowded = CudaAttention().attend(query.expand(32, 8, 64), keys, values, batch)
    alone = CudaAttention().attend(query, keys, values, decode_batch(num_seqs=1, context_len=3000))
    assert torch.equal(crowded[31], alone[0])


def decode_batch(num_seqs: int, context_len: int) -> InputBatch:
    """One row each; the first and the last sequence have the longest context."""
    sampling, table = SamplingParams(max_tokens=1, seed=0), tuple(range(-(-context_len // BLOCK_SIZE)))
    starts = [context_len - 1, *(7 * index for index in range(num_seqs - 2)), context_len - 1][:num_seqs]
    items = (ScheduledSequence(f"r{i}", (1,), start, table, 0, sampling) for i, start in enumerate(starts))
    return InputBatch.build(SchedulerOutput(tuple(items)), BLOCK_SIZE, torch.device("cuda"))


def test_the_factory_gives_the_cuda_backend_for_a_cuda_device() -> None:
    assert isinstance(make_attention(torch.device("cuda")), CudaAttention)
