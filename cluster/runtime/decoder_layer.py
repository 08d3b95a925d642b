"""Decoder layers, operation by operation: what a layer is, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from cluster.runtime.attention import AttentionBackend
from cluster.runtime.input_batch import InputBatch
from cluster.runtime.kv_store import KVCache
from cluster.runtime.layers import LayerOps, Linear
from cluster.runtime.model_spec import ModelSpec
from cluster.runtime.weights import LayerWeights


class LayerStack(Protocol):
    """All decoder layers of a model."""

    def forward(self, hidden: Tensor, rotary: Tensor, batch: InputBatch, kv: KVCache) -> Tensor:
        """hidden [num_tokens, hidden_size] in and out; writes the step's keys and values.

        rotary: each token's row of the rotary table. The input may be overwritten.
        """
        ...


def _as_it_is(linear: Linear) -> Linear:
    return linear


class PlainLayerStack:
    """Layers computed one operation at a time.

    `whole` wraps the two products that end a half of a layer: where a rank has a part of their input only, it adds the
    other ranks' parts of the sum.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[LayerWeights],
        ops: LayerOps,
        attention: AttentionBackend,
        whole: Callable[[Linear], Linear] = _as_it_is,
    ) -> None:
        self._layers = tuple(DecoderLayer(spec, layer, ops, attention, whole) for layer in layers)

    def forward(self, hidden: Tensor, rotary: Tensor, batch: InputBatch, kv: KVCache) -> Tensor:
        """See LayerStack.forward."""
        for layer, cache in zip(self._layers, kv.layers, strict=True):
            hidden = layer.forward(hidden, rotary, cache, batch)
        return hidden


class DecoderLayer:
    """One layer's parameters: attention over the paged cache, then the gated MLP, each added to the residual."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: LayerWeights,
        ops: LayerOps,
        attention: AttentionBackend,
        whole: Callable[[Linear], Linear],
    ) -> None:
        dtype = ops.activation_dtype(weights.qkv.weight.dtype)
        self._ops = ops
        self._attention = attention
        self._spec = spec
        self._input_norm = weights.input_norm.to(dtype)
        self._qkv = ops.linear(weights.qkv)
        self._qk_norm = None if weights.qk_norm is None else weights.qk_norm.to(dtype)
        self._output = whole(ops.linear(weights.output))
        self._mlp_norm = weights.mlp_norm.to(dtype)
        self._gate_up = ops.linear(weights.gate_up)
        self._down = whole(ops.linear(weights.down))

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
