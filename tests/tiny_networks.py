"""Tiny random checkpoints of families outside of the Llama family's decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fakes import TINY_VOCAB

SHAPE: dict[str, Any] = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_WINDOWED = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "output_router_logits": False}

# name -> model_type and what differs from the shape above; None removes a field that the family computes by itself
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"num_key_value_heads": None, "head_dim": None, "intermediate_size": None}),
    "gemma with one kv head": ("gemma", {"num_key_value_heads": 1, "head_dim": 24}),
    "gemma2": ("gemma2", {**_WINDOWED, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", {**_WINDOWED, "query_pre_attn_scalar": 10}),
    "phi": ("phi", {"head_dim": None, "partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {"head_dim": None, "sliding_window": 9}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": None, "head_dim": None}),
    "opt": ("opt", {"num_key_value_heads": None, "head_dim": None, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "stablelm": ("stablelm", {"head_dim": None}),
    "starcoder2": ("starcoder2", {"head_dim": None, "sliding_window": 9}),
    "olmo2": ("olmo2", {"head_dim": None}),
    "cohere": ("cohere", {"head_dim": None}),
    "mistral beyond its window": ("mistral", {"sliding_window": 9}),
    "qwen2 with one windowed layer": ("qwen2", {"head_dim": None, "use_sliding_window": True, **_WINDOWED}),
    "mixtral": ("mixtral", {"num_local_experts": 4, **_EXPERTS}),
    "qwen2_moe": ("qwen2_moe", {"head_dim": None, "num_experts": 4, "shared_expert_intermediate_size": 48, **_EXPERTS}),
}


def save_network(directory: Path, name: str, seed: int = 0, **overrides: Any) -> Any:
    """Write a random float32 checkpoint and return transformers' own model of it, with its eager attention."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, own = NETWORKS[name]
    torch.manual_seed(seed)
    fields = {key: value for key, value in (SHAPE | own | overrides).items() if value is not None}
    config = AutoConfig.for_model(family, pad_token_id=None, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():  # larger than the usual initialisation, so that every part of the network matters
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in parameter_name and parameter.dim() == 1 else 0.0, 0.15)
    model.save_pretrained(directory)
    return model
