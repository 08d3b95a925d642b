"""Rotary tables against transformers' own frequencies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cluster.runtime.model_spec import ModelSpec
from cluster.runtime.rotary import apply_rotary, rotary_table

pytestmark = pytest.mark.unit

SHAPE: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 4096}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **LLAMA3},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 512},
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 512,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "beta_fast": 16,
            "beta_slow": 2,
            "truncate": False,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 512,
            "attention_factor": 1.3,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_the_table_equals_transformers(rope: dict[str, Any]) -> None:
    config = LlamaConfig(**SHAPE, rope_parameters=rope)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(4096)[None])
    table = rotary_table(ModelSpec.from_pretrained_config(config.to_dict()).rope, 64, 4096)
    assert torch.allclose(table[:, :32], cos[0, :, :32], atol=2e-4)  # float32 angles of thousands of radians
    assert torch.allclose(table[:, 32:], sin[0, :, :32], atol=2e-4)
    assert torch.allclose(table[:64, :32], cos[0, :64, :32], atol=1e-5)


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    spec = ModelSpec.from_pretrained_config(LlamaConfig(**SHAPE).to_dict())
    table = rotary_table(spec.rope, 64, 100)
    query, key = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(1)).double()

    def score(query_at: int, key_at: int) -> float:
        q, k = query.clone(), key.clone()
        apply_rotary(q, table[[query_at]].double())
        apply_rotary(k, table[[key_at]].double())
        assert torch.allclose(q.norm(), query.norm())
        return float((q * k).sum())

    assert score(9, 4) == pytest.approx(score(89, 84), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)
