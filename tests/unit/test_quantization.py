"""Matrices as int8 with a scale for each row."""

from __future__ import annotations

import pytest
import torch

from cluster.runtime.layers import LinearWeights
from cluster.runtime.quantization import embed, quantize_rows, stack, store

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_number_is_within_half_a_step_of_its_own(dtype: torch.dtype) -> None:
    weight = (torch.randn(20, 70, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 2, 20)[:, None]).to(
        dtype
    )
    quantized, scales = quantize_rows(weight)
    assert quantized.dtype is torch.int8
    assert scales.dtype is torch.float32
    assert quantized.abs().amax(dim=1).tolist() == [127] * 20  # each row uses its whole range
    error = (quantized.double() * scales.double()[:, None] - weight.double()).abs()
    assert bool((error <= scales.double()[:, None] * 0.5001).all())


def test_a_row_of_zeros_stays_one() -> None:
    quantized, scales = quantize_rows(torch.zeros(2, 5))
    assert quantized.tolist() == [[0] * 5] * 2
    assert bool((scales > 0).all())


def test_stacked_matrices_keep_their_scales_and_biases() -> None:
    first, second = torch.randn(3, 8), torch.randn(2, 8) * 50
    parts = [store(weight, torch.int8, torch.ones(len(weight))) for weight in (first, second)]
    stacked, whole = stack(parts), store(torch.cat([first, second]), torch.int8, torch.ones(5))
    for one, other in zip(stacked.tensors, whole.tensors, strict=True):
        assert torch.equal(one, other)
    assert stack([LinearWeights(first), LinearWeights(second)]).tensors[1:] == []


def test_an_embedding_gives_back_its_rows() -> None:
    weight, token_ids = torch.randn(10, 16), torch.tensor([3, 3, 9])
    plain = embed(token_ids, store(weight, torch.float32), torch.float32)
    assert torch.equal(plain, weight[token_ids])
    coarse = embed(token_ids, store(weight, torch.int8), torch.float32)
    torch.testing.assert_close(coarse, plain, rtol=0, atol=0.02)
