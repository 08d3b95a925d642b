"""The decoder of the Llama family: Llama, Mistral, Qwen2, Qwen3, SmolLM, from one spec."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.runtime.attention import AttentionBackend, make_attention
from cluster.runtime.checkpoint import load_spec
from cluster.runtime.input_batch import InputBatch
from cluster.runtime.kv_store import KVCache
from cluster.runtime.layers import HeadNorm, RMSNorm, activation_dtype, gated_silu, make_linear
from cluster.runtime.model_spec import ModelError, ModelSpec
from cluster.runtime.rotary import apply_rotary, rotary_table
from cluster.runtime.weights import DecoderWeights, LayerWeights, load_weights


class DecoderLayer:
    """One layer's parameters: attention over the paged cache, then the gated MLP, each added to the residual."""

    def __init__(self, spec: ModelSpec, weights: LayerWeights, dtype: torch.dtype) -> None:
        self._heads = spec.num_heads
        self._rotated = spec.num_heads + spec.num_kv_heads  # queries and keys
        self._head_dim = spec.head_dim
        self._input_norm = RMSNorm(weights.input_norm.to(dtype), spec.norm_eps)
        self._qkv = make_linear(weights.qkv)
        self._qk_norm = None if weights.qk_norm is None else HeadNorm(weights.qk_norm.to(dtype), spec.norm_eps)
        self._output = make_linear(weights.output)
        self._mlp_norm = RMSNorm(weights.mlp_norm.to(dtype), spec.norm_eps)
        self._gate_up = make_linear(weights.gate_up)
        self._down = make_linear(weights.down)

    def forward(
        self,
        hidden: Tensor,
        rotary: Tensor,
        cache: tuple[Tensor, Tensor],
        batch: InputBatch,
        attention: AttentionBackend,
    ) -> Tensor:
        """hidden [num_tokens, hidden_size] is added to in place; rotary is the table's row for each token."""
        query, keys, values = self._project(self._input_norm(hidden), rotary)
        attention.write_kv(keys, values, *cache, batch)
        attended = attention.attend(query, *cache, batch)
        hidden += self._output(attended.flatten(1))
        hidden += self._down(gated_silu(self._gate_up(self._mlp_norm(hidden))))
        return hidden

    def _project(self, rows: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as [num_tokens, heads, head_dim] views of one packed tensor."""
        packed = self._qkv(rows).view(len(rows), -1, self._head_dim)
        query_key = packed[:, : self._rotated]
        if self._qk_norm is not None:
            query_key.copy_(self._qk_norm(query_key))
        apply_rotary(query_key, rotary)
        return packed[:, : self._heads], packed[:, self._heads : self._rotated], packed[:, self._rotated :]


class DecoderModel:
    """Owns the weights of one decoder; the KV cache and the batch are passed in.

    output_token_ids maps columns of the logits to token ids (int64 [output_size]); None: column i is token i.
    """

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, attention: AttentionBackend, max_model_len: int
    ) -> None:
        device = weights.embedding.device
        self.spec = spec
        self.device = device
        self.max_model_len = max_model_len
        self.output_token_ids = weights.output_token_ids
        self._dtype = activation_dtype(weights.embedding.dtype, device)
        self._attention = attention
        self._embedding = weights.embedding
        self._rotary = rotary_table(spec.rope, spec.head_dim, max_model_len).to(device)
        self._layers = tuple(DecoderLayer(spec, layer, self._dtype) for layer in weights.layers)
        self._norm = RMSNorm(weights.norm.to(self._dtype), spec.norm_eps)
        self._head = make_linear(weights.head)

    def forward(self, batch: InputBatch, kv: KVCache) -> Tensor:
        """Logits of the sampled rows, float32 [num_samples, output_size]; writes the step's keys and values."""
        hidden = F.embedding(batch.token_ids, self._embedding).to(self._dtype)
        rotary = self._rotary[batch.positions]
        for layer, keys, values in zip(self._layers, kv.keys, kv.values, strict=True):
            hidden = layer.forward(hidden, rotary, (keys, values), batch, self._attention)
        return self._head(self._norm(hidden[batch.sample_rows])).float()


def load_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    target_path: Path | None = None,
    max_model_len: int | None = None,
    attention: AttentionBackend | None = None,
) -> DecoderModel:
    """Load a model directory, see load_weights. Sequences can have at most min(max_model_len, the model's own) tokens.

    Raises ModelError, also when the model's attention is windowed within that length.
    """
    spec = load_spec(path)
    length = min(max_model_len or spec.max_position, spec.max_position)
    if spec.sliding_window is not None and length > spec.sliding_window:
        raise ModelError(
            f"{path} attends over a sliding window, which is not supported beyond the window: "
            f"set max_model_len to {spec.sliding_window} or less (it is {length})"
        )
    weights = load_weights(path, spec, dtype, device, target_path)
    return DecoderModel(spec, weights, attention or make_attention(device), length)
