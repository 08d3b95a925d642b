"""Paged attention behind one protocol: torch reference, numba kernels for the CPU, FlashAttention for CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cluster.runtime.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a model's attention departs from softmax(q k^T / sqrt(head_dim)) over all earlier keys."""

    scale: float | None = None  # factor on the products; None: head_dim**-0.5
    window: int | None = None  # a row sees this many keys, its own included; None: all
    softcap: float | None = None  # scaled scores s become softcap * tanh(s / softcap); None: as they are

    def scale_for(self, head_dim: int) -> float:
        """The factor on the products of queries and keys."""
        return head_dim**-0.5 if self.scale is None else self.scale


PLAIN = AttentionOptions()


class AttentionBackend(Protocol):
    """Causal attention of a step's rows over paged keys and values.

    One layer's keys (and values) are [num_blocks, block_size, num_kv_heads, head_dim]; token j of a sequence lies in
    block block_table[j // block_size] at offset j % block_size. A row at position p sees the keys 0 .. p of its own
    sequence, so the step's own keys and values must be written before `attend` is called.
    """

    def write_kv(
        self, keys: Tensor, values: Tensor, layer_keys: Tensor, layer_values: Tensor, batch: InputBatch
    ) -> None:
        """Store the step's keys and values, [num_tokens, num_kv_heads, head_dim], in their slots.

        Converts to the cache's dtype, rounding to nearest even.
        """

    def attend(
        self,
        query: Tensor,
        layer_keys: Tensor,
        layer_values: Tensor,
        batch: InputBatch,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """Attention output [num_tokens, num_heads, head_dim] for query of the same shape."""


def block_multiple(device: torch.device, dtype: torch.dtype) -> int:
    """What the block size of a cache must be a multiple of: FlashAttention 2 reads pages of 256 tokens."""
    return 256 if device.type == "cuda" and dtype.itemsize == 2 else 1


def flash_computes(head_dim: int, dtype: torch.dtype, options: AttentionOptions) -> bool:
    """Whether FlashAttention 2 reads a cache of such heads and attends in such a way."""
    return dtype.itemsize == 2 and head_dim % 8 == 0 and head_dim <= 256 and options.softcap is None


def make_attention(device: torch.device) -> AttentionBackend:
    """The backend for a device; imports only what that device needs."""
    if device.type == "cuda":
        from cluster.runtime.attention.cuda import CudaAttention

        return CudaAttention()
    from cluster.runtime.attention.cpu import CpuAttention

    return CpuAttention()
