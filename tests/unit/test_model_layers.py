"""The CPU's layer operations against plain torch."""

from __future__ import annotations

import pytest
import torch

from cluster.runtime.cpu_layers import CpuLayerOps
from cluster.runtime.layers import LinearWeights, TorchLayerOps

pytestmark = pytest.mark.unit

CPU, TORCH = CpuLayerOps(), TorchLayerOps()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_tokens", [1, 3, 300])
@pytest.mark.parametrize("head_dim", [2, 8, 32, 64, 72, 128])
def test_rotation_of_packed_heads_leaves_the_rest_alone(num_tokens: int, head_dim: int) -> None:
    packed = random(num_tokens, 7, head_dim)
    table_rows = random(num_tokens, head_dim, seed=1)
    wanted = packed.clone()
    TORCH.rotate(wanted[:, :5], table_rows)
    CPU.rotate(packed[:, :5], table_rows)
    assert torch.allclose(packed, wanted, atol=1e-6)


def test_rotation_refuses_layouts_that_the_kernel_does_not_read() -> None:
    table_rows = random(3, 8)
    with pytest.raises(ValueError, match="adjacent heads"):
        CPU.rotate(random(3, 8, 2).transpose(1, 2), table_rows)
    with pytest.raises(ValueError, match="adjacent heads"):
        CPU.rotate(random(3, 2, 8).double(), table_rows)
    with pytest.raises(ValueError, match="3 x 8 cosines and sines"):
        CPU.rotate(random(3, 2, 8), table_rows[:2])


@pytest.mark.parametrize("shape", [(5, 48), (5, 4, 16)])
def test_norms_agree(shape: tuple[int, ...]) -> None:
    rows, weight = random(*shape), random(*shape[1:], seed=1)
    assert torch.allclose(CPU.rms_norm(rows, weight, 1e-5), TORCH.rms_norm(rows, weight, 1e-5), atol=1e-5)


def test_gated_activations_agree() -> None:
    rows = 10 * random(5, 64)
    assert torch.allclose(CPU.gated_silu(rows), TORCH.gated_silu(rows), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_products_with_bias_and_residual_agree(dtype: torch.dtype, num_tokens: int) -> None:
    weights = LinearWeights(random(30, 48).to(dtype), random(30, seed=1).to(dtype))
    rows, residual = random(num_tokens, 48, seed=2), random(num_tokens, 30, seed=3)
    wanted = TORCH.linear(LinearWeights(weights.weight.float(), random(30, seed=1).to(dtype).float()))(rows, residual)
    tolerance = 1e-4 if dtype is torch.float32 else 0.2
    assert torch.allclose(CPU.linear(weights)(rows, residual), wanted, atol=tolerance)
    assert torch.allclose(CPU.linear(weights)(rows), wanted - residual, atol=tolerance)
