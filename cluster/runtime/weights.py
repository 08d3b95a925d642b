"""A checkpoint's tensors in the shapes that the decoder computes with: fused, cast, and on the device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cluster.runtime.checkpoint import Checkpoint, load_spec
from cluster.runtime.layers import LinearWeights
from cluster.runtime.model_spec import ModelError as ModelError  # what every loader here raises
from cluster.runtime.model_spec import ModelSpec

_EMBEDDING = "model.embed_tokens.weight"
_HARMLESS = (".rotary_emb.inv_freq",)  # derived from the config; old checkpoints carry it


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor  # [hidden]
    qkv: LinearWeights  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]: queries, keys, values
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]
    output: LinearWeights  # [hidden, num_heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: LinearWeights  # [2 * intermediate, hidden]: gate, then up
    down: LinearWeights  # [hidden, intermediate]


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """A whole decoder. `output_token_ids` maps logit columns to token ids, None when they are the same."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: LinearWeights  # [output_size, hidden]; the embedding itself when tied
    output_token_ids: Tensor | None  # int64 [output_size]


def load_weights(
    path: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device, target_path: Path | None = None
) -> DecoderWeights:
    """Read a model directory. A draft that shares its target's embedding needs the target's directory.

    Raises ModelError for damaged files and for missing, surplus or misshapen tensors.
    """
    with Checkpoint(path) as checkpoint:
        reader = _Reader(checkpoint, spec, dtype, device)
        embedding = (
            reader.embedding() if not _shares(spec) else _target_embedding(path, spec, dtype, device, target_path)
        )
        weights = DecoderWeights(
            embedding=embedding,
            layers=tuple(reader.layer(index) for index in range(spec.num_layers)),
            norm=reader.read("model.norm.weight", spec.hidden_size),
            head=reader.head(embedding),
            output_token_ids=reader.output_token_ids(),
        )
        tied = ("lm_head.weight",) if spec.tied_embedding else ()
        checkpoint.refuse_unread(ignored=(*_HARMLESS, *tied))
    return weights


def _shares(spec: ModelSpec) -> bool:
    return spec.draft is not None and spec.draft.shares_target_embedding


def _target_embedding(
    path: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device, target_path: Path | None
) -> Tensor:
    if target_path is None:
        raise ModelError(f"{path} uses its target's embedding: it can only be a draft beside a target")
    target = load_spec(target_path)
    if (target.vocab_size, target.hidden_size) != (spec.vocab_size, spec.hidden_size):
        raise ModelError(
            f"{path} was made for a target with an embedding of {spec.vocab_size} x {spec.hidden_size}, "
            f"but {target_path} has {target.vocab_size} x {target.hidden_size}"
        )
    with Checkpoint(target_path) as checkpoint:
        return _Reader(checkpoint, target, dtype, device).embedding()


class _Reader:
    """Reads one checkpoint's tensors, cast and on the device."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype
        self._device = device

    def read(self, name: str, *shape: int) -> Tensor:
        return self._checkpoint.weight(name, *shape).to(self._device, self._dtype)

    def embedding(self) -> Tensor:
        return self.read(_EMBEDDING, self._spec.vocab_size, self._spec.hidden_size)

    def head(self, embedding: Tensor) -> LinearWeights:
        if self._spec.tied_embedding:
            return LinearWeights(embedding)
        return LinearWeights(self.read("lm_head.weight", self._spec.output_size, self._spec.hidden_size))

    def output_token_ids(self) -> Tensor | None:
        spec = self._spec
        if spec.draft is None or spec.draft.output_vocab_size is None:
            return None
        ids = self._checkpoint.tensor("draft_vocab", spec.output_size).to(torch.int64)
        if ids.min() < 0 or ids.max() >= spec.vocab_size or len(set(ids.tolist())) != len(ids):
            raise ModelError(
                f"{self._checkpoint.path}: draft_vocab must hold distinct token ids below {spec.vocab_size}"
            )
        return ids.to(self._device)

    def layer(self, index: int) -> LayerWeights:
        spec, prefix = self._spec, f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        projections = {f"{attention}q_proj": query, f"{attention}k_proj": kv, f"{attention}v_proj": kv}
        gates = {f"{mlp}gate_proj": spec.intermediate_size, f"{mlp}up_proj": spec.intermediate_size}
        return LayerWeights(
            input_norm=self.read(f"{prefix}input_layernorm.weight", spec.hidden_size),
            qkv=self._fused(projections, spec.hidden_size, spec.qkv_bias),
            qk_norm=self._qk_norm(attention) if spec.qk_norm else None,
            output=self._fused({f"{attention}o_proj": spec.hidden_size}, query, spec.output_bias),
            mlp_norm=self.read(f"{prefix}post_attention_layernorm.weight", spec.hidden_size),
            gate_up=self._fused(gates, spec.hidden_size, spec.mlp_bias),
            down=self._fused({f"{mlp}down_proj": spec.hidden_size}, spec.intermediate_size, spec.mlp_bias),
        )

    def _fused(self, out_features: dict[str, int], in_features: int, bias: bool) -> LinearWeights:
        """Matrices over the same input, stacked by rows."""
        weights = [self.read(f"{name}.weight", size, in_features) for name, size in out_features.items()]
        biases = [self.read(f"{name}.bias", size) for name, size in out_features.items()] if bias else None
        return LinearWeights(_stack(weights), _stack(biases) if biases else None)

    def _qk_norm(self, prefix: str) -> Tensor:
        spec = self._spec
        query = self.read(f"{prefix}q_norm.weight", spec.head_dim).expand(spec.num_heads, -1)
        key = self.read(f"{prefix}k_norm.weight", spec.head_dim).expand(spec.num_kv_heads, -1)
        return torch.cat([query, key])


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
