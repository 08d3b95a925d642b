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
from cluster.runtime.layers import LayerOps, make_layer_ops
from cluster.runtime.model_spec import ModelError, ModelSpec
from cluster.runtime.rotary import rotary_table
from cluster.runtime.weights import DecoderWeights, LayerWeights, load_weights


class DecoderLayer:
    """One layer's parameters: attention over the paged cache, then the gated MLP, each added to the residual."""

    def __init__(self, spec: ModelSpec, weights: LayerWeights, ops: LayerOps, attention: AttentionBackend) -> None:
        dtype = ops.activation_dtype(weights.qkv.weight.dtype)
        self._ops = ops
        self._attention = attention
        self._spec = spec
        self._input_norm = weights.input_norm.to(dtype)
        self._qkv = ops.linear(weights.qkv)
        self._qk_norm = None if weights.qk_norm is None else weights.qk_norm.to(dtype)
        self._output = ops.linear(weights.output)
        self._mlp_norm = weights.mlp_norm.to(dtype)
        self._gate_up = ops.linear(weights.gate_up)
        self._down = ops.linear(weights.down)

    def forward(self, hidden: Tensor, rotary: Tensor, cache: tuple[Tensor, Tensor], batch: InputBatch) -> Tensor:
        """hidden [num_tokens, hidden_size] in and out; rotary holds the table's row for each token."""
        ops, eps = self._ops, self._spec.norm_eps
        query, keys, values = self._project(ops.rms_norm(hidden, self._input_norm, eps), rotary)
        self._attention.write_kv(keys, values, *cache, batch)
        attended = self._attention.attend(query, *cache, batch)
        hidden = self._output(attended.flatten(1), hidden)
        gate_up = self._gate_up(ops.rms_norm(hidden, self._mlp_norm, eps))
        return self._down(ops.gated_silu(gate_up), hidden)

    def _project(self, rows: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as [num_tokens, heads, head_dim] views."""
        spec, rotated = self._spec, self._spec.num_heads + self._spec.num_kv_heads
        packed = self._qkv(rows).view(len(rows), -1, spec.head_dim)
        query_key = packed[:, :rotated]
        if self._qk_norm is not None:
            query_key = self._ops.rms_norm(query_key, self._qk_norm, spec.norm_eps)
        self._ops.rotate(query_key, rotary)
        return query_key[:, : spec.num_heads], query_key[:, spec.num_heads :], packed[:, rotated:]


class DecoderModel:
    """Owns the weights of one decoder; the KV cache and the batch are passed in.

    output_token_ids maps columns of the logits to token ids (int64 [output_size]); None: column i is token i.
    """

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, ops: LayerOps, attention: AttentionBackend, max_model_len: int
    ) -> None:
        self.spec = spec
        self.device = weights.embedding.device
        self.max_model_len = max_model_len
        self.output_token_ids = weights.output_token_ids
        self._ops = ops
        self._dtype = ops.activation_dtype(weights.embedding.dtype)
        self._embedding = weights.embedding
        self._rotary = rotary_table(spec.rope, spec.head_dim, max_model_len).to(self.device)
        self._layers = tuple(DecoderLayer(spec, layer, ops, attention) for layer in weights.layers)
        self._norm = weights.norm.to(self._dtype)
        self._head = ops.linear(weights.head)

    def forward(self, batch: InputBatch, kv: KVCache) -> Tensor:
        """Logits of the sampled rows, float32 [num_samples, output_size]; writes the step's keys and values."""
        hidden = F.embedding(batch.token_ids, self._embedding).to(self._dtype)
        rotary = self._rotary[batch.positions]
        for layer, cache in zip(self._layers, kv.layers, strict=True):
            hidden = layer.forward(hidden, rotary, cache, batch)
        sampled = self._ops.rms_norm(hidden[batch.sample_rows], self._norm, self.spec.norm_eps)
        return self._head(sampled).float()


def load_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    target_path: Path | None = None,
    max_model_len: int | None = None,
    ops: LayerOps | None = None,
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
    return DecoderModel(spec, weights, ops or make_layer_ops(device), attention or make_attention(device), length)
