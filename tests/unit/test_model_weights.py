"""Damaged, incomplete and surprising checkpoints are each refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.runtime.checkpoint import load_spec
from cluster.runtime.weights import ModelError, load_weights
from tests.fakes import EOS_ID, byte_level_backend, edit_json, save_tiny_checkpoint, save_tiny_draft

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load(path: Path, target: Path | None = None) -> None:
    load_weights(path, load_spec(path), torch.float32, CPU, target)


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / WEIGHTS)
    edit(tensors)
    save_file(tensors, path / WEIGHTS)


def refusal(path: Path, target: Path | None = None) -> str:
    with pytest.raises(ModelError) as error:
        load(path, target)
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_tiny_checkpoint(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    save_tiny_checkpoint(tmp_path / "whole").save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    return tmp_path / "shards"


def test_a_directory_without_a_config_is_no_model(tmp_path: Path) -> None:
    assert "is not a model: it has no config.json" in refusal(tmp_path)


def test_a_config_that_is_not_json(model: Path) -> None:
    (model / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(model)


def test_a_config_that_is_not_an_object(model: Path) -> None:
    (model / "config.json").write_text("[]")
    assert "config.json is not a JSON object" in refusal(model)


def test_an_unsupported_family_names_the_directory(model: Path) -> None:
    edit_json(model / "config.json", model_type="mamba")
    assert "model type 'mamba' is not supported" in refusal(model)


def test_missing_weights(model: Path) -> None:
    (model / WEIGHTS).unlink()
    (model / "pytorch_model.bin").write_bytes(b"")
    assert "has no model.safetensors; other formats of weights are not supported" in refusal(model)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file(model: Path, keep: int) -> None:
    content = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(content[:keep])
    assert "is damaged or incomplete" in refusal(model)


def test_a_missing_tensor(model: Path) -> None:
    edit_tensors(model, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "has no tensor model.layers.1.mlp.up_proj.weight" in refusal(model)


def test_a_misshapen_tensor(model: Path) -> None:
    edit_tensors(model, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(47)}))
    assert "tensor model.norm.weight has shape [47], its config says [48]" in refusal(model)


def test_a_tensor_of_integers(model: Path) -> None:
    edit_tensors(model, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}))
    assert "tensor model.norm.weight has dtype int8" in refusal(model)


def test_a_number_that_float16_does_not_hold(model: Path) -> None:
    edit_tensors(model, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].fill_(7e4))
    with pytest.raises(ModelError, match=r"up_proj\.weight has numbers beyond float16's range"):
        load_weights(model, load_spec(model), torch.float16, CPU)


def test_a_tensor_that_the_config_does_not_announce(model: Path) -> None:
    edit_tensors(model, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}))
    assert "config.json does not account for tensor model.layers.0.self_attn.q_proj.bias (1 such)" in refusal(model)


def test_harmless_surplus_is_taken(model: Path) -> None:
    edit_tensors(
        model, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    )
    edit_json(model / "config.json", tie_word_embeddings=True)  # the file keeps its lm_head, which is not used
    load(model)


def test_a_missing_shard(shards: Path) -> None:
    next(iter(sorted(shards.glob("*.safetensors")))).unlink()
    assert "of-" in refusal(shards)
    assert refusal(shards).endswith("is missing")


def test_an_index_that_promises_too_much(shards: Path) -> None:
    index = json.loads((shards / INDEX).read_text())
    first = next(iter(index["weight_map"].values()))
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = first
    (shards / INDEX).write_text(json.dumps(index))
    assert "has no tensor model.layers.9.mlp.up_proj.weight, which the index promises" in refusal(shards)


def test_an_index_without_a_map(shards: Path) -> None:
    edit_json(shards / INDEX, weight_map=None)
    assert "has no weight_map" in refusal(shards)


def test_a_draft_without_its_target(model: Path, tmp_path: Path) -> None:
    save_tiny_draft(tmp_path / "draft", vocab=[5, 3])
    load(tmp_path / "draft", target=model)
    assert "it can only be a draft beside a target" in refusal(tmp_path / "draft")


def test_a_draft_of_another_target(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path / "target", vocab_size=50)
    save_tiny_draft(tmp_path / "draft", vocab=[5, 3])
    message = refusal(tmp_path / "draft", target=tmp_path / "target")
    assert "was made for a target with an embedding of 97 x 48" in message
    assert "has 50 x 48" in message


@pytest.mark.parametrize("vocab", [[5, 5], [5, 97], [-1, 5]])
def test_a_draft_vocabulary_that_makes_no_sense(model: Path, tmp_path: Path, vocab: list[int]) -> None:
    save_tiny_draft(tmp_path / "draft", vocab)
    assert "draft_vocab must hold distinct token ids below 97" in refusal(tmp_path / "draft", target=model)


def test_generation_config_names_the_end_of_sequence_tokens(model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9]}))
    assert load_spec(model).eos_token_ids == {1, 9}


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
def test_an_end_of_turn_that_only_the_tokenizer_names_ends_sequences_too(model: Path, file: str, eos: object) -> None:
    byte_level_backend().save(str(model / "tokenizer.json"))
    (model / file).write_text(json.dumps({"eos_token": eos}))
    assert load_spec(model).eos_token_ids == {1, EOS_ID}


def test_a_tokenizer_that_names_no_end_or_an_unknown_one_changes_nothing(model: Path) -> None:
    byte_level_backend().save(str(model / "tokenizer.json"))
    for eos in (None, "<|unheard_of|>"):
        (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert load_spec(model).eos_token_ids == {1}


def test_a_damaged_tokenizer_is_named(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        load_spec(model)
