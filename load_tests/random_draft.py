"""A draft model that knows nothing: random weights over the target's vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from cluster.runtime.model_store import resolve_model

HIDDEN, INTERMEDIATE, HEADS = 64, 128, 2


def save_random_draft(folder: Path, target: str, seed: int = 0) -> Path:
    """Write a one-layer Llama checkpoint with the target's vocabulary and special tokens into `folder`."""
    source = json.loads((resolve_model(target) / "config.json").read_text())
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HIDDEN // HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        **{key: source[key] for key in ("vocab_size", "eos_token_id", "bos_token_id", "max_position_embeddings")},
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed_tokens": (source["vocab_size"], HIDDEN),
        "layers.0.self_attn.q_proj": (HIDDEN, HIDDEN),
        "layers.0.self_attn.k_proj": (HIDDEN // HEADS, HIDDEN),
        "layers.0.self_attn.v_proj": (HIDDEN // HEADS, HIDDEN),
        "layers.0.self_attn.o_proj": (HIDDEN, HIDDEN),
        "layers.0.mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "layers.0.mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "layers.0.mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    tensors = {f"model.{name}.weight": torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    for norm in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        tensors[f"model.{norm}.weight"] = torch.ones(HIDDEN)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
