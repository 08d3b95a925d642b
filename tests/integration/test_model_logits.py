"""The decoder's logits against transformers' own, in float32, over paged keys and values in scattered blocks."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.runtime.attention.cpu import CpuAttention
from cluster.runtime.attention.reference import ReferenceAttention
from cluster.runtime.cpu_layers import CpuLayerOps
from cluster.runtime.input_batch import InputBatch
from cluster.runtime.kv_store import KVCache
from cluster.runtime.layers import TorchLayerOps
from cluster.runtime.model import Backend, DecoderModel, load_model
from cluster.runtime.model_spec import UnsupportedModel
from cluster.runtime.quantization import quantize_rows
from cluster.tokenizer import Tokenizer
from tests.fakes import TINY_VOCAB, save_tiny_checkpoint, save_tiny_draft
from tests.paged_run import BLOCK_SIZE, CPU, SAMPLING, PagedRun, expected_logits, random_tokens, relative_error

pytestmark = pytest.mark.integration


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> DecoderModel:
    return load_model(path, dtype, CPU, **options)


BACKENDS: dict[str, dict[str, Any]] = {
    "fastest": {},
    "kernels one by one": {"backend": Backend(CpuLayerOps(), CpuAttention())},
    "torch": {"backend": Backend(TorchLayerOps(), ReferenceAttention())},
}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama with tied embeddings": {"family": "llama", "tie_word_embeddings": True},
    "llama with biases everywhere": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama without grouped heads": {"family": "llama", "num_key_value_heads": 6},
    "mistral": {"family": "mistral", "sliding_window": None},
    "mistral within its window": {"family": "mistral", "sliding_window": 64, "max_position_embeddings": 64},
    "qwen2": {"family": "qwen2"},
    "qwen2 with tied embeddings": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3"},
    "qwen3 with heads wider than its hidden size": {"family": "qwen3", "hidden_size": 40, "head_dim": 16},
    "qwen3 with attention bias": {"family": "qwen3", "attention_bias": True},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers_for_whole_and_for_chunked_prompts(name: str, backend: str, tmp_path: Path) -> None:
    reference = save_tiny_checkpoint(tmp_path, **FAMILIES[name])
    model = load(tmp_path, **BACKENDS[backend])
    tokens = random_tokens(50)
    expected = expected_logits(reference, tokens)

    whole = PagedRun(model, 1, len(tokens)).step({0: tokens})
    assert relative_error(whole, expected) < 1e-5

    run = PagedRun(model, 1, len(tokens))
    cuts = [0, 7, 8, 30, 41, *range(42, 51)]  # prefill in chunks that end inside blocks, then decode
    chunked = torch.cat([run.step({0: tokens[start:end]}) for start, end in itertools.pairwise(cuts)])
    assert relative_error(chunked, expected) < 1e-5


def test_sequences_in_one_batch_do_not_see_each_other(tmp_path: Path) -> None:
    reference = save_tiny_checkpoint(tmp_path)
    run = PagedRun(load(tmp_path), 3, 40)
    prompts = [random_tokens(length, seed=length) for length in (40, 33, 12)]
    expected = [expected_logits(reference, prompt) for prompt in prompts]

    run.step({0: prompts[0][:39], 1: prompts[1][:20]})
    mixed = run.step({2: prompts[2], 0: prompts[0][39:], 1: prompts[1][20:25]})  # prefill, decode, verify
    wanted = torch.cat([expected[2], expected[0][39:], expected[1][20:25]])
    assert relative_error(mixed, wanted) < 1e-5


def test_rejected_draft_tokens_are_forgotten_by_writing_over_them(tmp_path: Path) -> None:
    reference = save_tiny_checkpoint(tmp_path)
    run = PagedRun(load(tmp_path), 1, 40)
    tokens = random_tokens(30)
    run.step({0: tokens[:20]})
    run.step({0: [tokens[20], 5, 6, 7, 8]})  # four wrong guesses
    run.done[0] = 21
    assert relative_error(run.step({0: tokens[21:]}), expected_logits(reference, tokens)[21:]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
def test_logits_do_not_depend_on_batch_or_chunks_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, family="qwen3")
    model = load(tmp_path, dtype)
    tokens, other = random_tokens(60), random_tokens(90, seed=8)
    alone = PagedRun(model, 1, 60)
    one_by_one = torch.cat([alone.step({0: [token]}) for token in tokens])
    run = PagedRun(model, 2, 90)
    cuts = [0, 23, 24, 29, 60]  # a chunk, a decode row, a verification, a chunk
    together = [run.step({1: other[start:end], 0: tokens[start:end]}) for start, end in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat([rows[len(rows) // 2 :] for rows in together]), one_by_one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_one_call_for_all_layers_gives_the_bits_of_single_operations(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_tiny_checkpoint(tmp_path, family=family)
    tokens = random_tokens(40)
    runs = [PagedRun(load(tmp_path, dtype, **BACKENDS[name]), 1, 40) for name in ("fastest", "kernels one by one")]
    for start, end in ((0, 5), (5, 6), (6, 38), (38, 40)):
        fast, slow = (run.step({0: tokens[start:end]}) for run in runs)
        assert torch.equal(fast, slow)
    assert torch.equal(torch.stack(runs[0].kv.keys), torch.stack(runs[1].kv.keys))
    assert torch.equal(torch.stack(runs[0].kv.values), torch.stack(runs[1].kv.values))


def test_a_step_without_samples_writes_keys_and_returns_no_rows(tmp_path: Path) -> None:
    reference = save_tiny_checkpoint(tmp_path)
    run = PagedRun(load(tmp_path), 1, 20)
    tokens = random_tokens(20)
    chunk = ScheduledSequence("0", tuple(tokens[:12]), 0, run.tables[0], 0, SAMPLING)
    with torch.inference_mode():
        nothing = run.model.forward(InputBatch.build(SchedulerOutput((chunk,)), BLOCK_SIZE), run.kv)
    assert nothing.shape == (0, TINY_VOCAB)
    run.done[0] = 12
    assert relative_error(run.step({0: tokens[12:]}), expected_logits(reference, tokens)[12:]) < 1e-5


def test_a_sharded_checkpoint_gives_the_same_logits(tmp_path: Path) -> None:
    reference = save_tiny_checkpoint(tmp_path / "whole")
    reference.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    tokens = random_tokens(20)
    logits = PagedRun(load(tmp_path / "shards"), 1, 20).step({0: tokens})
    assert relative_error(logits, expected_logits(reference, tokens)) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_weights_are_close_to_float32(backend: str, tmp_path: Path) -> None:
    reference = save_tiny_checkpoint(tmp_path)
    tokens = random_tokens(30)
    logits = PagedRun(load(tmp_path, torch.bfloat16, **BACKENDS[backend]), 1, 30).step({0: tokens})
    assert logits.dtype is torch.float32
    assert relative_error(logits, expected_logits(reference, tokens)) < 0.03


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("backend", ["fastest", "kernels one by one"])
def test_smaller_weights_compute_what_they_stand_for(backend: str, dtype: torch.dtype, tmp_path: Path) -> None:
    reference = save_tiny_checkpoint(tmp_path, tie_word_embeddings=True, attention_bias=True)
    tokens = random_tokens(30)
    whole = expected_logits(reference.double(), tokens)
    logits = PagedRun(load(tmp_path, dtype, **BACKENDS[backend]), 1, 30).step({0: tokens})
    assert logits.dtype is torch.float32
    assert 1e-5 < relative_error(logits.double(), whole) < (2e-3 if dtype == torch.float16 else 0.1)
    for parameter in reference.parameters():
        parameter.data = stored_as(parameter.data, dtype)
    assert relative_error(logits.double(), expected_logits(reference, tokens)) < 1e-5


def stored_as(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """What a weight is after it was stored, in float64; vectors beside int8 matrices stay as they are."""
    if dtype != torch.int8:
        return weight.to(dtype).double()
    if weight.dim() == 1:
        return weight
    quantized, scales = quantize_rows(weight.float())
    return quantized.double() * scales.double()[:, None]


def test_each_dtype_has_its_bytes(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, tie_word_embeddings=True, hidden_size=96, intermediate_size=256)
    sizes = [load(tmp_path, dtype).weight_bytes for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8)]
    assert sizes[1] == sizes[2] == sizes[0] / 2
    assert 0.5 < sizes[3] / sizes[1] < 0.56  # scales are a larger share of so small matrices


def test_a_float16_model_keeps_its_keys_and_values_in_float16(tmp_path: Path) -> None:
    reference, tokens = save_tiny_checkpoint(tmp_path), random_tokens(30)
    run = PagedRun(load(tmp_path, torch.float16), 1, 30)
    run.kv = KVCache.allocate(run.model.spec, run.kv.num_blocks, BLOCK_SIZE, torch.float16, CPU)
    run.step({0: tokens[:20]})
    assert relative_error(run.step({0: tokens[20:]}), expected_logits(reference, tokens)[20:]) < 5e-3


def test_a_draft_scores_its_own_vocabulary_with_its_targets_embedding(tmp_path: Path) -> None:
    vocab = [90, 3, 41, 7, 12]
    save_tiny_checkpoint(tmp_path / "target", tie_word_embeddings=True)
    save_tiny_draft(tmp_path / "draft", vocab)
    draft = load(tmp_path / "draft", target_path=tmp_path / "target")
    assert draft.output_token_ids is not None
    assert draft.output_token_ids.tolist() == vocab

    reference = save_tiny_checkpoint(tmp_path / "same", seed=1, num_hidden_layers=1)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    reference.set_input_embeddings(target.get_input_embeddings())
    tokens = random_tokens(20)
    logits = PagedRun(draft, 1, 20).step({0: tokens})
    assert logits.shape == (20, len(vocab))
    assert relative_error(logits, expected_logits(reference, tokens)[:, : len(vocab)]) < 1e-5


def test_a_windowed_model_is_for_another_network_beyond_its_window(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, family="mistral", sliding_window=64)
    assert load(tmp_path, max_model_len=64).max_model_len == 64
    with pytest.raises(UnsupportedModel, match=r"set max_model_len to 64 or less \(it is 65\)"):
        load(tmp_path, max_model_len=65)


def test_the_demo_models_logits_equal_transformers(demo_model_dir: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32).eval()
    model = load(demo_model_dir, max_model_len=1024)
    tokens = random.Random(1).choices(range(model.spec.vocab_size), k=150)
    expected = expected_logits(reference, tokens)

    assert relative_error(PagedRun(model, 1, 150, block_size=16).step({0: tokens}), expected) < 1e-4
    run = PagedRun(model, 1, 150, block_size=16)
    cuts = [0, 64, 100, 139, 144, *range(145, 151)]
    chunked = torch.cat([run.step({0: tokens[start:end]}) for start, end in itertools.pairwise(cuts)])
    assert relative_error(chunked, expected) < 1e-4


def test_the_demo_draft_often_guesses_what_its_target_says(demo_model_dir: Path, demo_draft_dir: Path) -> None:
    target = load(demo_model_dir, torch.bfloat16, max_model_len=256)
    draft = load(demo_draft_dir, torch.bfloat16, target_path=demo_model_dir, max_model_len=256)
    prompt = Tokenizer.load(demo_model_dir).apply_chat_template(
        [{"role": "user", "content": "Explain bees in simple terms."}]
    )
    run = PagedRun(target, 1, 256, block_size=16)
    tokens = [*prompt, int(run.step({0: prompt})[-1].argmax())]
    for _ in range(40):
        tokens.append(int(run.step({0: tokens[-1:]})[-1].argmax()))

    assert draft.output_token_ids is not None
    logits = PagedRun(draft, 1, 256, block_size=16).step({0: tokens[:-1]})[len(prompt) - 1 :]
    guesses = draft.output_token_ids[logits.argmax(dim=-1)].tolist()
    right = sum(guess == token for guess, token in zip(guesses, tokens[len(prompt) :], strict=True))
    assert right / len(guesses) > 0.3
