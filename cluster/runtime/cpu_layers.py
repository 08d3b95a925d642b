"""A decoder layer's operations on the CPU: float32 activations, stored matrices, our own kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.runtime.cpu_kernels import PackedLinear, default_torch_above_rows, gated_silu, linear, rms_norm
from cluster.runtime.kernels.rotary import launch_rotary, rotary_function
from cluster.runtime.layers import Linear, LinearWeights
from cluster.runtime.threads import kernel_team


@dataclass(frozen=True, slots=True, eq=False)
class CpuLinear:
    """A matrix for the linear kernel."""

    packed: PackedLinear

    def __call__(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """See Linear."""
        return linear(rows, self.packed, residual)


class CpuLayerOps:
    """In float32 a row's results depend on that row alone, to the bit, whatever else is in the batch.

    batch_invariant: with bfloat16 weights too, which then never go through torch's product.
    """

    def __init__(self, batch_invariant: bool = False) -> None:
        self.torch_above_rows = None if batch_invariant else default_torch_above_rows()

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """See LayerOps.activation_dtype: weights are widened on the fly."""
        return torch.float32

    def linear(self, weights: LinearWeights) -> Linear:
        """See LayerOps.linear."""
        return CpuLinear(PackedLinear.pack(weights.weight, weights.bias, self.torch_above_rows, weights.scales))

    def rms_norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See LayerOps.rms_norm."""
        return rms_norm(rows.contiguous(), weight, eps)

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        """See LayerOps.gated_silu."""
        return gated_silu(gate_up)

    def rotate(self, heads: Tensor, table_rows: Tensor) -> None:
        """See LayerOps.rotate. Raises ValueError for a layout that the kernel does not read."""
        num_tokens, num_heads, head_dim = heads.shape
        if heads.dtype != torch.float32 or heads.stride(2) != 1 or heads.stride(1) != head_dim or head_dim % 2:
            raise ValueError(f"expected float32 rows of adjacent heads, got {heads.dtype} {heads.stride()}")
        if table_rows.shape != (num_tokens, head_dim) or not table_rows.is_contiguous():
            raise ValueError(f"expected {num_tokens} x {head_dim} cosines and sines, got {tuple(table_rows.shape)}")
        addresses = (heads.data_ptr(), table_rows.data_ptr())
        sizes = (4 * heads.stride(0), num_tokens, num_heads, head_dim)
        launch_rotary(kernel_team().address, rotary_function(), *addresses, *sizes)
