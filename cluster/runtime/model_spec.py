"""What a checkpoint's config.json says, parsed once into frozen values, or refused in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ModelError(ValueError):
    """A model cannot be served: missing, corrupt or unsupported. The message is one sentence for a person."""


class UnsupportedModel(ModelError):
    """A sound model that the Llama family's decoder does not compute; another way of serving it may."""


@dataclass(frozen=True, slots=True)
class KVHeads:
    """What one layer keeps of a token: a key and a value of head_dim numbers for each of num_heads heads."""

    num_heads: int
    head_dim: int


class Family(StrEnum):
    """Decoder families, by transformers' `model_type`; SmolLM is a Llama."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


class RopeType(StrEnum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base frequency and, for the scaled types, how frequencies are stretched."""

    rope_type: RopeType
    theta: float
    factor: float = 1.0
    original_max_position: int = 0  # context length before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: derived from the factor
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """How a draft checkpoint departs from transformers' layout (`paceline_draft` in config.json)."""

    target: str | None  # the model that it was trained for, by name
    shares_target_embedding: bool
    output_vocab_size: int | None  # None: the full vocabulary


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder of the Llama family."""

    family: Family
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: RopeSpec
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embedding: bool
    sliding_window: int | None
    eos_token_ids: frozenset[int]
    draft: DraftSpec | None = None

    @property
    def output_size(self) -> int:
        """Columns of the logits."""
        reduced = self.draft.output_vocab_size if self.draft else None
        return reduced or self.vocab_size

    @property
    def kv_heads(self) -> tuple[KVHeads, ...]:
        """What each layer keeps of a token."""
        return (KVHeads(self.num_kv_heads, self.head_dim),) * self.num_layers

    @classmethod
    def from_pretrained_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Parse transformers' config.json. Raises ModelError naming what is missing or not supported."""
        return _Parser(config).spec()


def parse_eos(config: Mapping[str, Any]) -> frozenset[int]:
    """The token ids of `eos_token_id`. Raises ModelError for anything but an id, a list of them, or none."""
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) for item in values):
        raise ModelError(f"config.json: eos_token_id must be a token id or a list of them, got {value!r}")
    return frozenset(values)


_REQUIRED = object()


class _Parser:
    """Reads typed fields out of one config.json."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def spec(self) -> ModelSpec:
        family = self._family()
        self._refuse_unsupported()
        heads, hidden = self._size("num_attention_heads"), self._size("hidden_size")
        spec = ModelSpec(
            family=family,
            num_layers=self._size("num_hidden_layers"),
            hidden_size=hidden,
            intermediate_size=self._size("intermediate_size"),
            num_heads=heads,
            num_kv_heads=self._size("num_key_value_heads", heads),
            head_dim=self._size("head_dim", hidden // heads),
            vocab_size=self._size("vocab_size"),
            max_position=self._size("max_position_embeddings"),
            norm_eps=self._number("rms_norm_eps", 1e-6),
            rope=self._rope(),
            qkv_bias=family is Family.QWEN2 or (family is not Family.MISTRAL and self._flag("attention_bias")),
            output_bias=family in (Family.LLAMA, Family.QWEN3) and self._flag("attention_bias"),
            mlp_bias=family is Family.LLAMA and self._flag("mlp_bias"),
            qk_norm=family is Family.QWEN3,
            tied_embedding=self._flag("tie_word_embeddings"),
            sliding_window=self._sliding_window(family),
            eos_token_ids=parse_eos(self._config),
            draft=self._draft(),
        )
        _check_heads(spec)
        return spec

    def _family(self) -> Family:
        model_type = self._config.get("model_type")
        try:
            return Family(str(model_type))
        except ValueError:
            known = ", ".join(Family)
            raise UnsupportedModel(f"model type {model_type!r} is not supported; supported types are {known}") from None

    def _refuse_unsupported(self) -> None:
        activation = self._config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise UnsupportedModel(f"activation {activation!r} is not supported, only silu is")
        if (quantization := self._config.get("quantization_config")) is not None:
            method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
            raise ModelError(
                f"weights quantised with {method!r} are not supported; use a float checkpoint or a GGUF file"
            )

    def _rope(self) -> RopeSpec:
        """Both layouts: `rope_parameters` (transformers ≥ 5) and `rope_theta` with `rope_scaling`."""
        parameters = self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}
        if not isinstance(parameters, Mapping):
            raise ModelError(f"config.json: rope_parameters must be an object, got {parameters!r}")
        rope = _Parser(parameters)
        if self._number("partial_rotary_factor", rope._number("partial_rotary_factor", 1.0)) != 1.0:
            raise UnsupportedModel("partial rotary embeddings are not supported")
        original = self._config.get("original_max_position_embeddings") or self._size("max_position_embeddings")
        rope_type = rope._rope_type()
        if rope_type is not RopeType.DEFAULT and rope._optional_number("factor") is None:
            raise ModelError(f"rope type {rope_type.value!r} needs a factor")
        return RopeSpec(
            rope_type=rope_type,
            theta=rope._number("rope_theta", self._number("rope_theta", 10_000.0)),
            factor=rope._number("factor", 1.0),
            original_max_position=rope._size("original_max_position_embeddings", original),
            low_freq_factor=rope._number("low_freq_factor", 1.0),
            high_freq_factor=rope._number("high_freq_factor", 4.0),
            beta_fast=rope._number("beta_fast", 32.0),
            beta_slow=rope._number("beta_slow", 1.0),
            attention_factor=rope._optional_number("attention_factor"),
            mscale=rope._optional_number("mscale"),
            mscale_all_dim=rope._optional_number("mscale_all_dim"),
            truncate=bool(parameters.get("truncate", True)),
        )

    def _rope_type(self) -> RopeType:
        name = self._config.get("rope_type", self._config.get("type", RopeType.DEFAULT))
        try:
            return RopeType(str(name))
        except ValueError:
            known = ", ".join(RopeType)
            raise UnsupportedModel(f"rope type {name!r} is not supported; supported types are {known}") from None

    def _sliding_window(self, family: Family) -> int | None:
        """The narrowest window of any layer, None when all layers see everything."""
        if family is Family.LLAMA or self._config.get("sliding_window") is None:
            return None
        kinds = self._config.get("layer_types")
        if isinstance(kinds, list) and "sliding_attention" not in kinds:
            return None
        if family in (Family.QWEN2, Family.QWEN3) and kinds is None:
            if not self._flag("use_sliding_window"):
                return None
            if self._size("max_window_layers", 0, minimum=0) >= self._size("num_hidden_layers"):
                return None
        return self._size("sliding_window")

    def _draft(self) -> DraftSpec | None:
        value = self._config.get("paceline_draft")
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ModelError(f"config.json: paceline_draft must be an object, got {value!r}")
        draft = _Parser(value)
        reduced = value.get("output_vocab_size")
        return DraftSpec(
            target=value.get("target"),
            shares_target_embedding=draft._flag("shares_target_embedding"),
            output_vocab_size=None if reduced is None else draft._size("output_vocab_size"),
        )

    def _size(self, name: str, default: object = _REQUIRED, minimum: int = 1) -> int:
        value = self._config.get(name)
        if value is None:
            value = default
        if value is _REQUIRED:
            raise ModelError(f"config.json has no {name}")
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ModelError(f"config.json: {name} must be an integer of at least {minimum}, got {value!r}")
        return value

    def _optional_number(self, name: str) -> float | None:
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ModelError(f"config.json: {name} must be a number, got {value!r}")
        return float(value)

    def _number(self, name: str, default: float) -> float:
        value = self._optional_number(name)
        return default if value is None else value

    def _flag(self, name: str) -> bool:
        value = self._config.get(name)
        if value not in (None, True, False):
            raise ModelError(f"config.json: {name} must be true or false, got {value!r}")
        return bool(value)


def _check_heads(spec: ModelSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(
            f"config.json: {spec.num_heads} attention heads do not share {spec.num_kv_heads} KV heads evenly"
        )
    if spec.head_dim % 2:
        raise ModelError(f"config.json: head_dim must be even for rotary embeddings, got {spec.head_dim}")
