"""Writes a Llama model in transformers' format as GGUF, so that llama.cpp reads the same weights as everybody else.

Matrices become bf16 (unchanged) or Q8_0 (rounded, as llama.cpp's own converter does); norms are float32 in both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open

from load_tests.compare.peers.base import Weights

_TYPES = {Weights.BFLOAT16: gguf.GGMLQuantizationType.BF16, Weights.INT8: gguf.GGMLQuantizationType.Q8_0}
_FILE_TYPES = {Weights.BFLOAT16: gguf.LlamaFileType.MOSTLY_BF16, Weights.INT8: gguf.LlamaFileType.MOSTLY_Q8_0}


def write_gguf(model: Path, destination: Path, weights: Weights) -> None:
    """Complete or not at all. `model` is of the Llama family, with a byte-level BPE tokenizer (tokenizer.json)."""
    partial = destination.with_name(destination.name + ".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_name(model.name)
    writer.add_file_type(_FILE_TYPES[weights])
    _add_shape(writer, config)
    _add_vocabulary(writer, json.loads((model / "tokenizer.json").read_text()), config)
    for name, values in _tensors(model, config):
        kind = _TYPES[weights] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(destination)


def _add_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_vocabulary(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """The texts of token ids. Prompts are sent as token ids, so that no other tokenizer has a say in them."""
    pieces = {token_id: piece for piece, token_id in tokenizer["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    pieces |= special
    size = config["vocab_size"]
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([pieces.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types([kinds[i in special] for i in range(size)])
    writer.add_token_merges(
        [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    )
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(min(config["eos_token_id"]))


def _tensors(model: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """GGUF's names and float32 values, in the file's order."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    with safe_open(model / "model.safetensors", framework="pt") as source:
        for name in source.keys():  # noqa: SIM118 - no mapping, but a file with a method of that name
            values = source.get_tensor(name).to(torch.float32).numpy()
            yield names.get_name(name, (".weight", ".bias")), _with_pairs_adjacent(name, values, config)


def _with_pairs_adjacent(name: str, values: np.ndarray[Any, Any], config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """GGUF's llama has a head's rotary pairs side by side (2i, 2i + 1), transformers half a head apart."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    projection = name.split(".")[-2]
    if projection not in heads:
        return values
    halves = values.reshape(heads[projection], 2, config["head_dim"] // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
