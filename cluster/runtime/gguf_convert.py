"""Turns a GGUF file into a directory in transformers' format: bf16 safetensors, config and tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from cluster.runtime.fetch_progress import FetchProgress, ProgressCallback
from cluster.runtime.model_spec import ModelError, ModelSpec

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(source: Path, destination: Path, progress: ProgressCallback) -> None:
    """Dequantise `source` into the existing directory `destination`.

    Raises ModelError when the file is not readable GGUF, or holds a model of another kind.
    """
    metadata = _Metadata(_open(source), source.name)
    config = metadata.config()
    try:
        spec = ModelSpec.from_pretrained_config(config)
    except ModelError as error:
        raise ModelError(f"{source.name}: {error}") from error
    tensors = _tensors(metadata, spec, progress)
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    (destination / "model.safetensors").chmod(0o644)  # readable like the files beside it
    (destination / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    _save_tokenizer(source, destination)


def _open(source: Path) -> Any:
    try:
        return gguf.GGUFReader(source)
    except (ValueError, IndexError, KeyError, OverflowError) as error:  # what the reader raises on a bad or short file
        raise ModelError(f"{source} is not a complete GGUF file") from error


class _Metadata:
    """Reads one GGUF file's key-value pairs in terms of transformers' config.json."""

    def __init__(self, reader: Any, name: str) -> None:
        self.reader = reader
        self.name = name
        self.arch = str(self._value("general.architecture"))
        self.tensor_names = frozenset(tensor.name for tensor in reader.tensors)

    def config(self) -> dict[str, Any]:
        """Raises ModelError for what the format can say and the decoder cannot do."""
        self._refuse_unsupported()
        heads = self._value(f"{self.arch}.attention.head_count")
        hidden = self._value(f"{self.arch}.embedding_length")
        window = self._optional(f"{self.arch}.attention.sliding_window")
        return {
            "model_type": "mistral" if window and self.arch == "llama" else self.arch,
            "dtype": "bfloat16",
            "num_hidden_layers": self._value(f"{self.arch}.block_count"),
            "hidden_size": hidden,
            "intermediate_size": self._value(f"{self.arch}.feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._optional(f"{self.arch}.attention.head_count_kv") or heads,
            "head_dim": self._optional(f"{self.arch}.attention.key_length") or hidden // heads,
            "vocab_size": self._vocab_size(),
            "max_position_embeddings": self._value(f"{self.arch}.context_length"),
            "rms_norm_eps": self._value(f"{self.arch}.attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(),
            "attention_bias": "blk.0.attn_output.bias" in self.tensor_names,
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in self.tensor_names,
            "sliding_window": window,
            "use_sliding_window": window is not None,
            "bos_token_id": self._optional("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._eos_token_ids(),
        }

    def _refuse_unsupported(self) -> None:
        if self.arch not in ("llama", "qwen2", "qwen3"):
            raise ModelError(
                f"{self.name}: GGUF architecture {self.arch!r} is not supported, only llama, qwen2 and qwen3 are"
            )
        if self._optional(f"{self.arch}.expert_count"):
            raise ModelError(f"{self.name}: mixtures of experts are not supported")
        if "rope_freqs.weight" in self.tensor_names:
            raise ModelError(
                f"{self.name}: GGUF files with their own rope_freqs are not supported; use the original checkpoint"
            )

    def _rope(self) -> dict[str, Any]:
        prefix = f"{self.arch}.rope."
        kind = self._optional(prefix + "scaling.type") or "none"
        rope: dict[str, Any] = {
            "rope_type": "default" if kind == "none" else kind,
            "rope_theta": self._optional(prefix + "freq_base") or 10_000.0,
        }
        if kind != "none":
            rope["factor"] = self._optional(prefix + "scaling.factor")
            rope["original_max_position_embeddings"] = self._optional(prefix + "scaling.original_context_length")
        return rope

    def _vocab_size(self) -> int:
        for tensor in self.reader.tensors:
            if tensor.name == "token_embd.weight":
                return int(tensor.shape[1])  # GGUF lists dimensions innermost first
        raise ModelError(f"{self.name} has no tensor token_embd.weight")

    def _eos_token_ids(self) -> list[int]:
        values = (self._optional(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
        return sorted({value for value in values if value is not None})

    def _optional(self, key: str) -> Any:
        field = self.reader.fields.get(key)
        return None if field is None else field.contents()

    def _value(self, key: str) -> Any:
        value = self._optional(key)
        if value is None:
            raise ModelError(f"{self.name} has no {key}")
        return value


def _tensors(metadata: _Metadata, spec: ModelSpec, progress: ProgressCallback) -> dict[str, Tensor]:
    total = len(metadata.reader.tensors)
    tensors = {}
    for done, source in enumerate(metadata.reader.tensors):
        progress(FetchProgress("converting", done, total))
        name = _transformers_name(source.name, metadata.name)
        weights = gguf.dequantize(source.data, source.tensor_type)
        if metadata.arch == "llama":
            weights = _undo_rotary_permutation(name, weights, spec)
        tensors[name] = torch.tensor(weights).to(torch.bfloat16)
    progress(FetchProgress("converting", total, total))
    return tensors


def _transformers_name(name: str, file_name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{suffix}"
    raise ModelError(f"{file_name} has a tensor that the decoder does not know: {name}")


def _undo_rotary_permutation(name: str, weights: np.ndarray[Any, Any], spec: ModelSpec) -> np.ndarray[Any, Any]:
    """GGUF's llama has a head's rotary pairs side by side (2i, 2i + 1), transformers half a head apart."""
    heads = spec.num_heads if ".q_proj." in name else spec.num_kv_heads if ".k_proj." in name else 0
    if not heads:
        return weights
    pairs = weights.reshape(heads, spec.head_dim // 2, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def _save_tokenizer(source: Path, destination: Path) -> None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name, local_files_only=True)
        tokenizer.save_pretrained(str(destination))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelError(f"{source.name}: its tokenizer cannot be read: {error}") from error
