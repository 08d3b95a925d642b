"""Paged attention in plain torch, one sequence at a time: what the fast backends must agree with."""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.runtime.attention import PLAIN, AttentionOptions
from cluster.runtime.input_batch import InputBatch


class ReferenceAttention:
    """Readable attention for any device and dtype; computes in float32 (float64 if given float64)."""

    def write_kv(
        self, keys: Tensor, values: Tensor, layer_keys: Tensor, layer_values: Tensor, batch: InputBatch
    ) -> None:
        """See AttentionBackend.write_kv."""
        layer_keys.flatten(0, 1)[batch.slot_mapping] = keys.to(layer_keys.dtype)
        layer_values.flatten(0, 1)[batch.slot_mapping] = values.to(layer_values.dtype)

    def attend(
        self,
        query: Tensor,
        layer_keys: Tensor,
        layer_values: Tensor,
        batch: InputBatch,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """See AttentionBackend.attend."""
        starts = batch.host.query_start.tolist()
        outputs = [
            attend_one(
                query[start:end], _gather(layer_keys, table, context), _gather(layer_values, table, context), options
            )
            for start, end, table, context in zip(
                starts, starts[1:], batch.block_table, batch.host.context_len.tolist(), strict=False
            )
        ]
        return torch.cat(outputs) if outputs else torch.empty_like(query)


def attend_one(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions = PLAIN) -> Tensor:
    """Causal attention of one sequence whose queries are its last rows.

    query [num_rows, num_heads, head_dim]; keys, values [context_len, num_kv_heads, head_dim]; returns query's shape.
    """
    num_rows, num_heads, head_dim = query.shape
    context_len, num_kv_heads, _ = keys.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = num_heads // num_kv_heads
    keys = keys.to(dtype).repeat_interleave(group, dim=1)  # [context_len, num_heads, head_dim]
    values = values.to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("rhd,khd->hrk", query.to(dtype), keys) * options.scale_for(head_dim)
    positions = torch.arange(context_len - num_rows, context_len, device=query.device)
    distance = positions[:, None] - torch.arange(context_len, device=query.device)  # [num_rows, context_len]
    return torch.einsum("hrk,khd->rhd", attention_weights(scores, distance, options), values).to(query.dtype)


def attention_weights(scores: Tensor, distance: Tensor, options: AttentionOptions) -> Tensor:
    """Softmax over the last dimension of scaled scores, for keys that lie `distance` before their row."""
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    visible = distance >= 0
    if options.window is not None:
        visible &= distance < options.window
    return scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)


def _gather(layer: Tensor, block_table: Tensor, context_len: int) -> Tensor:
    """One sequence's first context_len keys or values, [context_len, num_kv_heads, head_dim]."""
    num_blocks = -(-context_len // layer.shape[1])
    return layer[block_table[:num_blocks].long()].flatten(0, 1)[:context_len]
