"""A rank's part of a decoder: the same layers on fewer heads and a narrower MLP, whole again after each sum."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cluster.runtime.attention import make_attention
from cluster.runtime.checkpoint import load_spec
from cluster.runtime.decoder_layer import PlainLayerStack
from cluster.runtime.input_batch import InputBatch
from cluster.runtime.kv_store import KVCache
from cluster.runtime.layers import Linear, make_layer_ops
from cluster.runtime.model import context_length
from cluster.runtime.model_spec import ModelSpec
from cluster.runtime.quantization import embed
from cluster.runtime.rotary import rotary_table
from cluster.runtime.sharding import Shard, split_evenly
from cluster.runtime.tensor_parallel import TPGroup
from cluster.runtime.weights import DecoderWeights, load_weights


@dataclass(frozen=True, slots=True, eq=False)
class SummedLinear:
    """A matrix of which each rank has some columns, for as many features of the input."""

    part: Linear
    group: TPGroup

    def __call__(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """See Linear: rows have the rank's features; residual and result are whole, the same on every rank."""
        total = self.group.sum(self.part(rows))
        return total if residual is None else total.add_(residual)


class ShardedModel:
    """Owns one rank's weights. Every rank must run the same steps in the same order.

    The hidden state is whole on every rank, with the same bits. Logits are whole on rank 0 only.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        shard: Shard,
        group: TPGroup,
        max_model_len: int,
        batch_invariant: bool = False,
    ) -> None:
        device = weights.embedding.weight.device
        ops, local = make_layer_ops(device, batch_invariant), shard.spec_of(spec)
        self.spec = local
        self.device = device
        self.max_model_len = max_model_len
        self.output_token_ids = weights.output_token_ids
        self.weight_bytes = weights.num_bytes
        self._vocab = shard.vocab
        self._columns = split_evenly(spec.output_size, shard.num_ranks)
        self._group = group
        self._ops = ops
        self._dtype = ops.activation_dtype(weights.embedding.weight.dtype)
        self._embedding = weights.embedding
        self._rotary = rotary_table(spec.rope, spec.head_dim, max_model_len).to(device)
        self._layers = PlainLayerStack(
            local, weights.layers, ops, make_attention(device), lambda part: SummedLinear(part, group)
        )
        self._norm = weights.norm.to(self._dtype)
        self._head = ops.linear(weights.head)

    def forward(self, batch: InputBatch, kv: KVCache) -> Tensor:
        """See Model.forward; what ranks other than 0 return has their own columns only."""
        hidden = self._group.sum(self._embed(batch.token_ids))
        hidden = self._layers.forward(hidden, self._rotary[batch.positions], batch, kv)
        sampled = self._ops.rms_norm(hidden[batch.sample_rows], self._norm, self.spec.norm_eps)
        return self._group.gather_columns(self._head(sampled).float(), self._columns)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the embedding that this rank has, zeros for other tokens: [num_tokens, hidden_size]."""
        local = token_ids - self._vocab.start
        is_here = (local >= 0) & (local < len(self._vocab))
        rows = embed(torch.where(is_here, local, 0), self._embedding, self._dtype)
        return rows.masked_fill_(~is_here[:, None], 0)


def load_shard(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    group: TPGroup,
    target_path: Path | None = None,
    max_model_len: int | None = None,
    batch_invariant: bool = False,
) -> ShardedModel:
    """Load this rank's part of a model directory, see model.load_model. Raises ModelError."""
    spec = load_spec(path)
    length = context_length(path, spec, max_model_len)
    shard = Shard.of(spec, group.rank, group.size)
    weights = load_weights(path, spec, dtype, device, target_path, shard)
    return ShardedModel(spec, weights, shard, group, length, batch_invariant)
