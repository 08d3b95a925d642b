"""A checkpoint's tensors in the shapes that the decoder computes with: fused, cast, and on the device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cluster.runtime.checkpoint import Checkpoint, Part, load_spec
from cluster.runtime.layers import LinearWeights
from cluster.runtime.model_spec import ModelError as ModelError  # what every loader here raises
from cluster.runtime.model_spec import ModelSpec
from cluster.runtime.quantization import stack, store
from cluster.runtime.sharding import Shard

_EMBEDDING = "model.embed_tokens.weight"
_HARMLESS = (".rotary_emb.inv_freq",)  # derived from the config; old checkpoints carry it


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer, or one rank's part of it: then the sizes below are those of Shard.spec_of."""

    input_norm: Tensor  # [hidden]
    qkv: LinearWeights  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]: queries, keys, values
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]
    output: LinearWeights  # [hidden, num_heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: LinearWeights  # [2 * intermediate, hidden]: gate, then up
    down: LinearWeights  # [hidden, intermediate]

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that the layer holds."""
        linears = [tensor for linear in (self.qkv, self.output, self.gate_up, self.down) for tensor in linear.tensors]
        return [self.input_norm, self.mlp_norm, *linears, *([] if self.qk_norm is None else [self.qk_norm])]


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """A whole decoder, or one rank's part. `output_token_ids` maps all logit columns to token ids, None: the same."""

    embedding: LinearWeights  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: LinearWeights  # [output_size, hidden]; the embedding itself when tied
    output_token_ids: Tensor | None  # int64 [output_size]

    @property
    def num_bytes(self) -> int:
        """Bytes of memory of all tensors; a tied embedding counts once."""
        layers = [tensor for layer in self.layers for tensor in layer.tensors]
        tensors = [*self.embedding.tensors, self.norm, *layers]
        if self.head is not self.embedding:
            tensors.extend(self.head.tensors)
        return sum(tensor.nbytes for tensor in tensors)


def load_weights(
    path: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    target_path: Path | None = None,
    shard: Shard | None = None,
) -> DecoderWeights:
    """Read a model directory, or `shard` of it and no more. `spec` is the whole model's either way.

    dtype: of the matrices; int8 quantises them and leaves the vectors in float32. A draft that shares its target's
    embedding needs the target's directory.

    Raises ModelError for damaged files and for missing, surplus or misshapen tensors.
    """
    shard = shard or Shard.of(spec, 0, 1)
    with Checkpoint(path) as checkpoint:
        reader = _Reader(checkpoint, spec, dtype, device, shard)
        embedding = _target_embedding(reader, target_path) if _shares(spec) else reader.embedding()
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


def _target_embedding(reader: _Reader, target_path: Path | None) -> LinearWeights:
    path, spec = reader.path, reader.spec
    if target_path is None:
        raise ModelError(f"{path} uses its target's embedding: it can only be a draft beside a target")
    target = load_spec(target_path)
    if (target.vocab_size, target.hidden_size) != (spec.vocab_size, spec.hidden_size):
        raise ModelError(
            f"{path} was made for a target with an embedding of {spec.vocab_size} x {spec.hidden_size}, "
            f"but {target_path} has {target.vocab_size} x {target.hidden_size}"
        )
    with Checkpoint(target_path) as checkpoint:
        return reader.beside(checkpoint).embedding()


class _Reader:
    """Reads one rank's part of a checkpoint's tensors, cast and on the device."""

    def __init__(
        self, checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype, device: torch.device, shard: Shard
    ) -> None:
        self.spec = spec
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._vector_dtype = torch.float32 if dtype == torch.int8 else dtype
        self._device = device
        self._shard = shard
        self._query = _heads_part(spec.num_heads, shard.query_heads, spec.head_dim)
        self._kv = _heads_part(spec.num_kv_heads, shard.kv_heads, spec.head_dim)
        self._intermediate = Part(spec.intermediate_size, shard.intermediate)

    @property
    def path(self) -> Path:
        return self._checkpoint.path

    def beside(self, checkpoint: Checkpoint) -> _Reader:
        """The same for another checkpoint with the same shapes."""
        return _Reader(checkpoint, self.spec, self._dtype, self._device, self._shard)

    def read(self, name: str, size: int | Part) -> Tensor:
        """A vector."""
        return self._converted(name, self._checkpoint.weight(name, size), self._vector_dtype)

    def _matrix(self, name: str, rows: int | Part, columns: int | Part, bias: Tensor | None = None) -> LinearWeights:
        weight = self._checkpoint.weight(name, rows, columns)
        if self._dtype != torch.int8:
            weight = self._converted(name, weight, self._dtype)
        return store(weight.to(self._device), self._dtype, bias)

    def _converted(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        converted = tensor.to(self._device, dtype)
        if dtype == torch.float16 and tensor.dtype != dtype and not converted.isfinite().all():
            raise ModelError(f"{self.path}: tensor {name} has numbers beyond float16's range; use another dtype")
        return converted

    def embedding(self) -> LinearWeights:
        return self._matrix(_EMBEDDING, Part(self.spec.vocab_size, self._shard.vocab), self.spec.hidden_size)

    def head(self, embedding: LinearWeights) -> LinearWeights:
        if self.spec.tied_embedding:
            return embedding
        return self._matrix("lm_head.weight", Part(self.spec.output_size, self._shard.output), self.spec.hidden_size)

    def output_token_ids(self) -> Tensor | None:
        spec = self.spec
        if spec.draft is None or spec.draft.output_vocab_size is None:
            return None
        ids = self._checkpoint.tensor("draft_vocab", spec.output_size).to(torch.int64)
        if ids.min() < 0 or ids.max() >= spec.vocab_size or len(set(ids.tolist())) != len(ids):
            raise ModelError(
                f"{self._checkpoint.path}: draft_vocab must hold distinct token ids below {spec.vocab_size}"
            )
        return ids.to(self._device)

    def layer(self, index: int) -> LayerWeights:
        spec, prefix = self.spec, f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        projections = {"q_proj": self._query, "k_proj": self._kv, "v_proj": self._kv}
        gates = {"gate_proj": self._intermediate, "up_proj": self._intermediate}
        return LayerWeights(
            input_norm=self.read(f"{prefix}input_layernorm.weight", spec.hidden_size),
            qkv=self._split_by_rows(attention, projections, spec.qkv_bias),
            qk_norm=self._qk_norm(attention) if spec.qk_norm else None,
            output=self._split_by_columns(f"{attention}o_proj", self._query, spec.output_bias),
            mlp_norm=self.read(f"{prefix}post_attention_layernorm.weight", spec.hidden_size),
            gate_up=self._split_by_rows(mlp, gates, spec.mlp_bias),
            down=self._split_by_columns(f"{mlp}down_proj", self._intermediate, spec.mlp_bias),
        )

    def _split_by_rows(self, prefix: str, outputs: dict[str, Part], bias: bool) -> LinearWeights:
        """Matrices over the same whole input, of which a rank computes some outputs; stacked."""
        size = self.spec.hidden_size
        names = {f"{prefix}{name}": part for name, part in outputs.items()}
        biases = [self.read(f"{name}.bias", part) if bias else None for name, part in names.items()]
        parts = zip(names.items(), biases, strict=True)
        return stack([self._matrix(f"{name}.weight", part, size, added) for (name, part), added in parts])

    def _split_by_columns(self, name: str, in_features: Part, bias: bool) -> LinearWeights:
        """A matrix over some inputs, whose products are summed over the ranks: the bias is added by the first."""
        size = self.spec.hidden_size
        added = self.read(f"{name}.bias", size) if bias else None
        return self._matrix(f"{name}.weight", size, in_features, added if self._shard.rank == 0 else None)

    def _qk_norm(self, prefix: str) -> Tensor:
        size, shard = self.spec.head_dim, self._shard
        query = self.read(f"{prefix}q_norm.weight", size).expand(len(shard.query_heads), -1)
        key = self.read(f"{prefix}k_norm.weight", size).expand(len(shard.kv_heads), -1)
        return torch.cat([query, key])


def _heads_part(num_heads: int, heads: range, head_dim: int) -> Part:
    """The features of some heads."""
    return Part(num_heads * head_dim, range(heads.start * head_dim, heads.stop * head_dim))
