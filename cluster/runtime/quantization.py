"""Matrices as int8: half the bytes of bfloat16, and the same float32 sums.

Each row (output feature) has one scale, its largest magnitude / 127, and is rounded to nearest. A product with it is
exact up to the rounding of float32 sums, and is multiplied by the scale at the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.runtime.layers import LinearWeights

_LARGEST = 127


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [rows, columns] and float32 scales [rows] of a matrix of any float dtype."""
    scales = weight.abs().amax(dim=1).float() / _LARGEST
    scales = torch.where(scales > 0, scales, 1.0)  # a row of zeros
    quantized = (weight.float() / scales[:, None]).round_().clamp_(-_LARGEST, _LARGEST)
    return quantized.to(torch.int8), scales


def store(weight: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> LinearWeights:
    """A matrix in the dtype that it is served in; int8 quantises it."""
    if dtype != torch.int8:
        return LinearWeights(weight.to(dtype), bias)
    quantized, scales = quantize_rows(weight)
    return LinearWeights(quantized, bias, scales)


def stack(parts: list[LinearWeights]) -> LinearWeights:
    """Matrices over the same input as one; all or none have biases, and scales."""
    return LinearWeights(
        torch.cat([part.weight for part in parts]),
        _stacked([part.bias for part in parts]),
        _stacked([part.scales for part in parts]),
    )


def _stacked(vectors: list[Tensor | None]) -> Tensor | None:
    present = [vector for vector in vectors if vector is not None]
    return torch.cat(present) if present else None


def embed(token_ids: Tensor, embedding: LinearWeights, dtype: torch.dtype) -> Tensor:
    """Rows of an embedding, [num_tokens, hidden_size] of the given dtype."""
    rows = F.embedding(token_ids, embedding.weight).to(dtype)
    return rows if embedding.scales is None else rows.mul_(embedding.scales[token_ids, None])
