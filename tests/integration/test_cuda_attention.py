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


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads", [(8, 2, 128), (9, 3, 64), (4, 4, 64)], ids=str)
def test_a_ragged_batch_agrees_with_the_reference(heads: tuple[int, int, int], batch_invariant: bool) -> None:
    batch = ragged_batch()
    shape = (6, BLOCK_SIZE, *heads[1:])
    keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn((batch.num_tokens, heads[0], heads[2]), device="cuda", dtype=torch.bfloat16)
    expected = ReferenceAttention().attend(query.float(), keys, values, batch)
    actual = CudaAttention(batch_invariant).attend(query, keys, values, batch)
    torch.testing.assert_close(actual.float(), expected, rtol=2e-2, atol=2e-2)


def test_the_factory_gives_the_cuda_backend_for_a_cuda_device() -> None:
    assert isinstance(make_attention(torch.device("cuda")), CudaAttention)
