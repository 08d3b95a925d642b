"""Paged attention on CUDA through torch's own variable-length FlashAttention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from cluster.runtime.attention import PLAIN, AttentionOptions
from cluster.runtime.attention.reference import ReferenceAttention
from cluster.runtime.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class CudaAttention:
    """Reads bf16 or fp16 keys and values in place through the block table.

    torch brings FlashAttention 2, which wants block sizes that are multiples of 256, on any GPU; version 3 takes any,
    but is a package of its own that has to be activated in torch, which nothing here does.
    FlashAttention knows neither float32 nor soft-capped scores: these go through the torch reference, which is slow
    and exact.
    batch_invariant: never split the keys of one sequence over thread blocks, so that a row's bits do not depend on
    what else is in the batch; costs speed when there are few rows with long contexts.
    """

    batch_invariant: bool = False

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
        if layer_keys.element_size() > 2 or options.softcap is not None:
            return ReferenceAttention().attend(query, layer_keys, layer_values, batch, options)
        output = varlen_attn(
            query.to(layer_keys.dtype),
            layer_keys,
            layer_values,
            batch.query_start,
            None,  # key lengths come from seqused_k, key places from block_table
            batch.max_query_len,
            batch.max_context_len,
            scale=options.scale_for(query.shape[2]),
            # keys to the left and to the right of a row's own; the last query's own is the last key
            window_size=(-1 if options.window is None else options.window - 1, 0),
            enable_gqa=query.shape[1] != layer_keys.shape[2],
            seqused_k=batch.context_len,
            block_table=batch.block_table,
            num_splits=1 if self.batch_invariant else None,
        )
        return cast(Tensor, output).to(query.dtype)
