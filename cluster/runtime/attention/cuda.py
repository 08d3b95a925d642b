"""Paged attention on CUDA through torch's own variable-length FlashAttention."""

from __future__ import annotations

from typing import cast

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from cluster.runtime.attention import PLAIN, AttentionOptions, flash_computes
from cluster.runtime.attention.dense import attend_dense
from cluster.runtime.attention.reference import ReferenceAttention
from cluster.runtime.input_batch import InputBatch


class CudaAttention:
    """Reads bf16 or fp16 keys and values in place through the block table.

    torch brings FlashAttention 2; version 3 is a package of its own that has to be activated, which nothing here does.
    It knows neither float32 nor soft-capped scores nor odd heads: these go through the torch reference, which is slow
    and exact.
    The keys of a sequence are never split over thread blocks. So a row's bits do not depend on its batch; and over a
    block table, the version 2 of torch 2.13 gives wrong rows when it splits them (flash-attention pull request 2550,
    torchtitan issue 3235). It costs speed when there are few rows with long contexts.
    """

    def write_kv(
        self, keys: Tensor, values: Tensor, layer_keys: Tensor, layer_values: Tensor, batch: InputBatch
    ) -> None:
        """See AttentionBackend.write_kv."""
        ReferenceAttention().write_kv(keys, values, layer_keys, layer_values, batch)

    def attend(
        self,
        query: Tensor,
        layer_keys: Tensor,
        layer_values: Tensor,
        batch: InputBatch,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """See AttentionBackend.attend."""
        if not flash_computes(layer_keys.shape[3], layer_keys.dtype, options):
            slow = attend_dense if batch.is_static else ReferenceAttention().attend
            return slow(query, layer_keys, layer_values, batch, options)
        output = varlen_attn(
            query.to(layer_keys.dtype),
            layer_keys,
            layer_values,
            batch.query_start,
            batch.query_start,  # asked for, but key lengths come from seqused_k and key places from block_table
            batch.max_query_len,
            batch.max_context_len,
            scale=options.scale_for(query.shape[2]),
            # keys to the left and to the right of a row's own; the last query's own is the last key
            window_size=(-1 if options.window is None else options.window - 1, 0),
            enable_gqa=query.shape[1] != layer_keys.shape[2],
            seqused_k=batch.context_len,
            block_table=batch.block_table,
            num_splits=1,
        )
        return cast(Tensor, output).to(query.dtype)
