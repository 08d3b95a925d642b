"""A draft model that knows nothing: random weights over the target's vocabulary."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from cluster.runtime.model_store import resolve_model

HEAD_DIM = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the network is: its guesses are worth nothing at any size, but a larger one makes them slowly."""

    hidden: int = 64
    intermediate: int = 128
    num_layers: int = 1

    @property
    def heads(self) -> int:
        return self.hidden // HEAD_DIM


def save_random_draft(folder: Path, target: str, seed: int = 0, shape: Shape | None = None) -> Path:
    """Write a Llama checkpoint with the target's vocabulary and special tokens into `folder`."""
    shape = shape or Shape()
    source = json.loads((resolve_model(target) / "config.json").read_text())
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        **{key: source[key] for key in ("vocab_size", "eos_token_id", "bos_token_id", "max_position_embeddings")},
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = _random_tensors(shape, source["vocab_size"], torch.Generator().manual_seed(seed))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _random_tensors(shape: Shape, vocab_size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, intermediate = shape.hidden, shape.intermediate
    shapes: dict[str, tuple[int, int]] = {"embed_tokens": (vocab_size, hidden)}
    norms = ["norm"]
    for layer in range(shape.num_layers):
        shapes |= {
            f"layers.{layer}.self_attn.q_proj": (hidden, hidden),
            f"layers.{layer}.self_attn.k_proj": (HEAD_DIM, hidden),
            f"layers.{layer}.self_attn.v_proj": (HEAD_DIM, hidden),
            f"layers.{layer}.self_attn.o_proj": (hidden, hidden),
            f"layers.{layer}.mlp.gate_proj": (intermediate, hidden),
            f"layers.{layer}.mlp.up_proj": (intermediate, hidden),
            f"layers.{layer}.mlp.down_proj": (hidden, intermediate),
        }
        norms += [f"layers.{layer}.input_layernorm", f"layers.{layer}.post_attention_layernorm"]
    tensors = {f"model.{name}.weight": torch.randn(size, generator=generator) * 0.2 for name, size in shapes.items()}
    return tensors | {f"model.{norm}.weight": torch.ones(hidden) for norm in norms}
