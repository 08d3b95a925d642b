"""The reference attention for batches that a CUDA graph reads: nothing depends on a value that the host would need."""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.runtime.attention import PLAIN, AttentionOptions
from cluster.runtime.attention.reference import attention_weights
from cluster.runtime.input_batch import InputBatch


def attend_dense(
    query: Tensor, layer_keys: Tensor, layer_values: Tensor, batch: InputBatch, options: AttentionOptions = PLAIN
) -> Tensor:
    """See AttentionBackend.attend; rows of no sequence come out as anything.

    Gathers whole block tables: num_seqs * table_width * block_size keys and values in float32.
    """
    num_rows, num_heads, head_dim = query.shape
    num_seqs, num_kv_heads = len(batch.context_len), layer_keys.shape[2]
    rows, offsets = (torch.arange(count, device=query.device) for count in (num_rows, batch.max_query_len))
    starts = batch.query_start[:-1].long()
    lengths = batch.query_start[1:] - starts
    ordered = query[(starts[:, None] + offsets).clamp(max=num_rows - 1)]  # [num_seqs, max_query_len, heads, head_dim]
    grouped = ordered.float().view(num_seqs, len(offsets), num_kv_heads, num_heads // num_kv_heads, head_dim)

    keys = layer_keys[batch.block_table.long()].flatten(1, 2).float()  # [num_seqs, context, kv_heads, head_dim]
    values = layer_values[batch.block_table.long()].flatten(1, 2).float()
    places = torch.arange(keys.shape[1], device=query.device)
    is_unused = places >= batch.context_len[:, None]  # what lies there may be NaN, which no weight of zero removes
    values = values.masked_fill(is_unused[:, :, None, None], 0.0)

    positions = (batch.context_len - lengths)[:, None] + offsets  # [num_seqs, max_query_len]
    distance = positions[:, :, None] - places
    scores = torch.einsum("srkgd,sckd->skgrc", grouped, keys) * options.scale_for(head_dim)
    weights = attention_weights(scores, distance[:, None, None], options)
    attended = torch.einsum("skgrc,sckd->srkgd", weights, values).flatten(2, 3)

    owners = torch.searchsorted(batch.query_start[1:].contiguous(), rows, right=True).clamp(max=num_seqs - 1)
    places_of_rows = (rows - starts[owners]).clamp(max=len(offsets) - 1)
    return attended[owners, places_of_rows].to(query.dtype)
