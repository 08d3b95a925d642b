"""What a decoder layer is computed with: one set of operations per device, behind one protocol.

Activations are [num_tokens, features]: float32 on the CPU, in the weights' dtype on CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.runtime.rotary import apply_rotary


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeights:
    """A matrix [out_features, in_features] and its bias [out_features], as the checkpoint has them or quantised.

    An int8 matrix has a scale for each row, float32 [out_features].
    """

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that it holds."""
        return [tensor for tensor in (self.weight, self.bias, self.scales) if tensor is not None]


class Linear(Protocol):
    """A matrix ready for its device."""

    def __call__(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """rows [num_tokens, in_features] times the matrix, plus bias and residual: [num_tokens, out_features]."""
        ...


class LayerOps(Protocol):
    """The operations of a decoder layer on one device. Inputs are not changed unless said."""

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """The dtype of activations and of norm weights, given that of the matrices."""

    def linear(self, weights: LinearWeights) -> Linear:
        """Prepare a matrix, once."""

    def rms_norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension; weight has the last one or two dimensions of rows."""

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up; a row holds gate and up side by side: [num_tokens, 2 * n] -> [num_tokens, n]."""

    def rotate(self, heads: Tensor, table_rows: Tensor) -> None:
        """Rotate heads [num_tokens, num_heads, head_dim] in place.

        table_rows: each token's row of the rotary table, float32 [num_tokens, head_dim].
        """


def make_layer_ops(device: torch.device, batch_invariant: bool = False) -> LayerOps:
    """The operations for a device; imports only what that device needs.

    batch_invariant: a row's products have the same bits whatever else is in the batch, in any dtype.
    """
    if device.type == "cpu":
        from cluster.runtime.cpu_layers import CpuLayerOps

        return CpuLayerOps(batch_invariant)
    return TorchLayerOps(batch_invariant)


@dataclass(frozen=True, slots=True, eq=False)
class TorchLinear:
    """Multiplies in the weight's dtype with torch's own kernels."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """See Linear."""
        product = F.linear(rows, self.weight, self.bias)
        return product if residual is None else product.add_(residual)


@dataclass(frozen=True, slots=True, eq=False)
class FixedRowsLinear:
    """Multiplies a fixed number of rows at a time: for other numbers, libraries choose kernels that sum differently."""

    ROWS: ClassVar[int] = 128

    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """See Linear."""
        padded = F.pad(rows, (0, 0, 0, -len(rows) % self.ROWS))
        products = [F.linear(part, self.weight, self.bias) for part in torch.split(padded, self.ROWS)]
        product = torch.cat(products)[: len(rows)]
        return product if residual is None else product.add_(residual)


@dataclass(frozen=True, slots=True)
class TorchLayerOps:
    """Plain torch, for CUDA and as what other devices' operations must agree with."""

    batch_invariant: bool = False

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """See LayerOps.activation_dtype."""
        return weight_dtype

    def linear(self, weights: LinearWeights) -> Linear:
        """See LayerOps.linear."""
        return (FixedRowsLinear if self.batch_invariant else TorchLinear)(weights.weight, weights.bias)

    def rms_norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See LayerOps.rms_norm."""
        if weight.dim() == 1:
            return F.rms_norm(rows, weight.shape, weight, eps)
        return F.rms_norm(rows, rows.shape[-1:], eps=eps) * weight

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        """See LayerOps.gated_silu."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rotate(self, heads: Tensor, table_rows: Tensor) -> None:
        """See LayerOps.rotate."""
        apply_rotary(heads, table_rows)
