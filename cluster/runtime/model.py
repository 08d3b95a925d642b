"""The decoder of the Llama family: Llama, Mistral, Qwen2, Qwen3, SmolLM, from one spec."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from cluster.runtime.attention import AttentionBackend, make_attention
from cluster.runtime.checkpoint import load_spec
from cluster.runtime.decoder_layer import LayerStack, PlainLayerStack
from cluster.runtime.input_batch import InputBatch
from cluster.runtime.kv_store import HasKV, KVCache
from cluster.runtime.layers import LayerOps, make_layer_ops
from cluster.runtime.model_spec import ModelSpec, UnsupportedModel
from cluster.runtime.quantization import embed
from cluster.runtime.rotary import rotary_table
from cluster.runtime.weights import DecoderWeights, load_weights


class ServedSpec(HasKV, Protocol):
    """What a runner needs to know of a model."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...


class Model(Protocol):
    """What a runner drives: logits out of rows, over KV memory that it is given."""

    @property
    def spec(self) -> ServedSpec: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of memory of all weights."""

    @property
    def output_token_ids(self) -> Tensor | None:
        """Token ids of the logits' columns, int64 [output_size]; None: column i is token i."""

    def forward(self, batch: InputBatch, kv: KVCache) -> Tensor:
        """Logits of the sampled rows, float32 [num_samples, output_size]; writes the step's keys and values."""
        ...


class DecoderModel:
    """Owns the weights of one decoder; the KV cache and the batch are passed in.

    output_token_ids maps columns of the logits to token ids (int64 [output_size]); None: column i is token i.
    """

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, ops: LayerOps, layers: LayerStack, max_model_len: int
    ) -> None:
        self.spec = spec
        self.device = weights.embedding.weight.device
        self.max_model_len = max_model_len
        self.output_token_ids = weights.output_token_ids
        self.weight_bytes = weights.num_bytes
        self._ops = ops
        self._layers = layers
        self._dtype = ops.activation_dtype(weights.embedding.weight.dtype)
        self._embedding = weights.embedding
        self._rotary = rotary_table(spec.rope, spec.head_dim, max_model_len).to(self.device)
        self._norm = weights.norm.to(self._dtype)
        self._head = ops.linear(weights.head)

    def forward(self, batch: InputBatch, kv: KVCache) -> Tensor:
        """Logits of the sampled rows, float32 [num_samples, output_size]; writes the step's keys and values."""
        hidden = embed(batch.token_ids, self._embedding, self._dtype)
        hidden = self._layers.forward(hidden, self._rotary[batch.positions], batch, kv)
        sampled = self._ops.rms_norm(hidden[batch.sample_rows], self._norm, self.spec.norm_eps)
        return self._head(sampled).float()


@dataclass(frozen=True, slots=True)
class Backend:
    """How to compute layers one operation at a time."""

    ops: LayerOps
    attention: AttentionBackend


def load_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    target_path: Path | None = None,
    max_model_len: int | None = None,
    backend: Backend | None = None,
    batch_invariant: bool = False,
) -> DecoderModel:
    """Load a model directory, see load_weights. Sequences can have at most min(max_model_len, the model's own) tokens.

    backend: None takes the fastest way of the device; batch_invariant: see make_layer_ops. Raises ModelError, and its
    subclass UnsupportedModel also when the model's attention is windowed within that length.
    """
    spec = load_spec(path)
    length = context_length(path, spec, max_model_len)
    weights = load_weights(path, spec, dtype, device, target_path)
    ops = backend.ops if backend else make_layer_ops(device, batch_invariant)
    if backend is None and device.type == "cpu":
        from cluster.runtime.cpu_decoder import CpuDecoder
        from cluster.runtime.cpu_layers import CpuLayerOps

        assert isinstance(ops, CpuLayerOps)
        return CpuDecoder(spec, weights, ops, length)
    attention = backend.attention if backend else make_attention(device)
    return DecoderModel(spec, weights, ops, PlainLayerStack(spec, weights.layers, ops, attention), length)


def context_length(path: Path, spec: ModelSpec, max_model_len: int | None) -> int:
    """Tokens of the longest sequence. Raises UnsupportedModel when the model's attention is windowed within that."""
    length = min(max_model_len or spec.max_position, spec.max_position)
    if spec.sliding_window is not None and length > spec.sliding_window:
        raise UnsupportedModel(
            f"{path} attends over a sliding window, which is not supported beyond the window: "
            f"set max_model_len to {spec.sliding_window} or less (it is {length})"
        )
    return length
