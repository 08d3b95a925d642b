"""The pieces of a decoder layer.

Activations are [num_tokens, features]: float32 on the CPU, in the weights' dtype on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]  # [num_tokens, in_features] -> [num_tokens, out_features]


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeights:
    """A matrix [out_features, in_features] and its bias [out_features], as the checkpoint has them."""

    weight: Tensor
    bias: Tensor | None = None


def make_linear(weights: LinearWeights) -> Linear:
    """A callable for the device that the weights are on."""
    return TorchLinear(weights.weight, weights.bias)


@dataclass(frozen=True, slots=True, eq=False)
class TorchLinear:
    """Multiplies in the weight's dtype with torch's own kernels and answers in the input's."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        return F.linear(rows.to(self.weight.dtype), self.weight, self.bias).to(rows.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """Root-mean-square norm over the last dimension."""

    weight: Tensor  # [features], in the activations' dtype
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        return F.rms_norm(rows, self.weight.shape[-1:], self.weight, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """Norm of every query and key head on its own (Qwen3)."""

    weight: Tensor  # [num_heads + num_kv_heads, head_dim]: each head's row
    eps: float

    def __call__(self, heads: Tensor) -> Tensor:
        return F.rms_norm(heads, heads.shape[-1:], eps=self.eps) * self.weight


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; a row holds gate and up side by side: [num_tokens, 2 * features] -> [num_tokens, features]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def activation_dtype(weight_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """float32 on the CPU, where kernels widen bf16 weights on the fly."""
    return torch.float32 if device.type == "cpu" else weight_dtype
