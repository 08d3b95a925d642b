"""What config.json may say, and the one sentence for what it may not."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.runtime.model_spec import Family, ModelError, ModelSpec, RopeType

pytestmark = pytest.mark.unit

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def parse(**fields: Any) -> ModelSpec:
    return ModelSpec.from_pretrained_config(LLAMA | fields)


def test_what_the_config_leaves_out_follows_from_the_rest() -> None:
    spec = ModelSpec.from_pretrained_config({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"})
    assert (spec.num_kv_heads, spec.head_dim, spec.output_size) == (4, 16, 100)
    assert spec.rope.rope_type is RopeType.DEFAULT
    assert spec.rope.theta == 10_000.0
    assert not spec.tied_embedding


@pytest.mark.parametrize(
    ("family", "fields", "qkv_bias", "output_bias", "qk_norm"),
    [
        ("llama", {}, False, False, False),
        ("llama", {"attention_bias": True}, True, True, False),
        ("mistral", {"attention_bias": True}, False, False, False),
        ("qwen2", {}, True, False, False),
        ("qwen3", {}, False, False, True),
        ("qwen3", {"attention_bias": True}, True, True, True),
    ],
)
def test_each_family_has_its_biases_and_norms(
    family: str, fields: dict[str, Any], qkv_bias: bool, output_bias: bool, qk_norm: bool
) -> None:
    spec = parse(model_type=family, **fields)
    assert spec.family is Family(family)
    assert (spec.qkv_bias, spec.output_bias, spec.qk_norm) == (qkv_bias, output_bias, qk_norm)


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"model_type": "llama", "sliding_window": 16}, None),
        ({"model_type": "mistral"}, None),
        ({"model_type": "mistral", "sliding_window": 16}, 16),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False}, None),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, None),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, 16),
        ({"model_type": "qwen3", "sliding_window": 16, "layer_types": ["full_attention", "full_attention"]}, None),
        ({"model_type": "qwen3", "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}, 16),
    ],
)
def test_a_sliding_window_counts_only_where_a_layer_uses_it(fields: dict[str, Any], window: int | None) -> None:
    assert parse(**fields).sliding_window == window


def test_rope_is_read_from_the_older_layout_too() -> None:
    scaling = {"type": "linear", "factor": 4.0}
    rope = parse(rope_theta=5e5, rope_scaling=scaling).rope
    assert (rope.rope_type, rope.theta, rope.factor, rope.original_max_position) == (RopeType.LINEAR, 5e5, 4.0, 128)


@pytest.mark.parametrize(("eos", "ids"), [(2, {2}), ([2, 7], {2, 7}), (None, set())])
def test_there_may_be_several_end_of_sequence_tokens_or_none(eos: Any, ids: set[int]) -> None:
    assert parse(eos_token_id=eos).eos_token_ids == ids


def test_a_draft_names_its_departures() -> None:
    spec = parse(paceline_draft={"target": "big", "shares_target_embedding": True, "output_vocab_size": 10})
    assert spec.draft is not None
    assert (spec.draft.target, spec.draft.shares_target_embedding, spec.output_size) == ("big", True, 10)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "gemma2"},
            "model type 'gemma2' is not supported; supported types are llama, mistral, qwen2, qwen3",
        ),
        ({"model_type": None}, "model type None is not supported"),
        ({"num_hidden_layers": None}, "config.json has no num_hidden_layers"),
        ({"hidden_size": "64"}, "hidden_size must be an integer of at least 1, got '64'"),
        ({"vocab_size": 0}, "vocab_size must be an integer of at least 1, got 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported, only silu is"),
        ({"num_key_value_heads": 3}, "4 attention heads do not share 3 KV heads evenly"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them"),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights quantised with 'gptq' are not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' needs a factor"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial rotary embeddings are not supported"),
        ({"paceline_draft": "yes"}, "paceline_draft must be an object"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as refusal:
        parse(**fields)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
