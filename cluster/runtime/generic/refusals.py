"""What a config.json says that the generic path cannot serve, each in one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from cluster.runtime.model_spec import ModelError

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def refuse_unknown(config: Mapping[str, Any]) -> None:
    """Raise ModelError unless transformers itself has the model's code; code in a checkpoint is never run."""
    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        own_code = "it brings its own code, which is never run" if "auto_map" in config else "transformers has no such"
        raise ModelError(f"model type {model_type!r} is not supported: {own_code}")
    if config.get("quantization_config") is not None:
        quantization = config["quantization_config"]
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise ModelError(f"weights quantised with {method!r} are not supported; use a float checkpoint or a GGUF file")
    if config.get("paceline_draft") is not None:
        raise ModelError(f"a paceline_draft of model type {model_type!r} is not supported, only of the Llama family")


def refuse_unservable(config: PretrainedConfig, max_model_len: int) -> None:
    """Raise ModelError for what is known not to work with paged causal attention up to max_model_len tokens."""
    reason = next(_reasons(config, config.to_dict(), max_model_len), None)
    if reason is not None:
        raise ModelError(f"model type {config.model_type!r} is not supported here: {reason}")


def _reasons(config: PretrainedConfig, fields: Mapping[str, Any], max_model_len: int) -> Iterator[str]:
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder, and only decoders are served"
    if fields.get("add_cross_attention"):
        yield "it has cross-attention, and only self-attention is paged"
    if config.get_text_config() is not config:
        yield "it is a multimodal model, and only plain text models are served"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        yield "transformers has no causal language model of this type"
    if fields.get("is_causal") is False or fields.get("use_bidirectional_attention"):
        yield "its attention is not causal"
    if fields.get("alibi"):
        yield "it uses ALiBi, which the paged attention does not compute"
    if fields.get("num_kv_shared_layers"):
        yield "its layers share keys and values, and the paged cache has a place for each layer"
    kinds = fields.get("layer_types") or fields.get("layers_block_type") or ()
    if strange := sorted(set(kinds) - _LAYER_TYPES):
        yield f"it has layers of type {strange[0]!r}, and only full and sliding attention are paged"
    yield from _rope_reasons(fields, max_model_len)


def _rope_reasons(fields: Mapping[str, Any], max_model_len: int) -> Iterator[str]:
    """Rotary embeddings whose frequencies follow the longest sequence of a batch would differ with the batch."""
    rope = fields.get("rope_parameters") or {}
    per_layer_type = [value for value in rope.values() if isinstance(value, Mapping)]
    for parameters in per_layer_type or [rope]:
        kind = parameters.get("rope_type", "default")
        original = parameters.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
        limit = original or fields.get("max_position_embeddings") or 0
        if kind in ("dynamic", "longrope") and max_model_len > limit:
            yield (
                f"its {kind!r} rotary embedding changes beyond {limit} tokens for all tokens at once: "
                f"set max_model_len to {limit} or less (it is {max_model_len})"
            )
