"""A runner, from a pool's configuration to sampled tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.config import Device, DType, PoolConfig, Quantization
from cluster.core.step import ScheduledSequence, SchedulerOutput, StepOutput
from cluster.messages.request import SamplingParams
from cluster.runtime.kv_store import total_memory
from cluster.runtime.model_runner import ModelRunner, block_size_of, build_runner, weight_dtype
from cluster.runtime.model_spec import ModelError
from tests.fakes import TINY_VOCAB, save_tiny_checkpoint, save_tiny_draft

pytestmark = pytest.mark.integration

GREEDY = SamplingParams(max_tokens=8, seed=0, temperature=0.0)


def build(path: Path, target: Path | None = None, **fields: Any) -> ModelRunner:
    defaults = {"dtype": DType.FLOAT32, "kv_blocks": 64, "block_size": 4, "max_num_batched_tokens": 64}
    pool = PoolConfig(path=str(path), **(defaults | fields))
    return build_runner(pool, Device.CPU, None if target is None else str(target))


def piece(
    tokens: list[int], start: int, samples: int, params: SamplingParams = GREEDY, name: str = "a"
) -> ScheduledSequence:
    return ScheduledSequence(name, tuple(tokens[start:]), start, tuple(range(9, 40)), samples, params)


def run(runner: ModelRunner, *pieces: ScheduledSequence) -> StepOutput:
    return runner.execute(SchedulerOutput(pieces))


def decode(runner: ModelRunner, prompt: list[int], count: int) -> list[int]:
    tokens, done = list(prompt), 0
    for _ in range(count):
        output = run(runner, piece(tokens, done, 1))
        done = len(tokens)
        tokens.extend(output.samples["a"].token_ids)
    return tokens[len(prompt) :]


def test_greedy_decoding_equals_transformers(tmp_path: Path) -> None:
    reference = save_tiny_checkpoint(tmp_path)
    prompt = [5, 17, 80, 2, 44]
    with torch.no_grad():
        wanted = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert decode(build(tmp_path), prompt, 20) == wanted[0, len(prompt) :].tolist()


def test_a_verification_step_samples_every_position(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path)
    runner = build(tmp_path)
    prompt = [5, 17, 80, 2, 44]
    tokens = prompt + decode(runner, prompt, 5)
    run(runner, piece(tokens[:5], 0, 0))
    output = run(runner, piece(tokens[:-1], 5, 4))
    assert list(output.samples["a"].token_ids) == tokens[6:]


def test_a_prefill_chunk_has_no_sample_and_logprobs_come_where_asked(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path)
    asked = SamplingParams(max_tokens=8, seed=0, temperature=0.0, num_logprobs=2)
    other = ScheduledSequence("b", (1, 2), 0, (50,), 0, GREEDY)
    output = run(build(tmp_path), other, piece([3, 4, 5], 0, 1, asked))
    assert list(output.samples) == ["a"]
    logprobs = output.samples["a"].logprobs
    assert logprobs is not None
    assert logprobs[0].token_id == output.samples["a"].token_ids[0] == logprobs[0].top[0][0]
    assert len(logprobs[0].top) == 2


def test_a_draft_samples_token_ids_of_its_own_vocabulary(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path / "target")
    vocab = [90, 3, 41, 7, 12]
    save_tiny_draft(tmp_path / "draft", vocab)
    runner = build(tmp_path / "draft", tmp_path / "target")
    assert set(decode(runner, [5, 60, 96], 12)) <= set(vocab)
    assert runner.vocab_size == TINY_VOCAB


def test_the_runner_knows_its_limits(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, eos_token_id=[1, 4])
    runner = build(tmp_path, max_model_len=100)
    assert (runner.num_blocks, runner.max_model_len, runner.eos_token_ids) == (64, 100, {1, 4})
    assert build(tmp_path, max_model_len=8192).max_model_len == 256  # the model's own


def test_a_memory_fraction_becomes_blocks(tmp_path: Path) -> None:
    model = save_tiny_checkpoint(tmp_path)
    assert model.config.max_position_embeddings == 256
    full = build(tmp_path, kv_blocks=None, max_num_seqs=3)
    assert full.num_blocks == 3 * 256 // 4  # a full batch of longest sequences needs no more
    fraction = 1e-6
    small = build(tmp_path, kv_blocks=None, kv_memory_fraction=fraction)
    block_bytes = full.kv_bytes // full.num_blocks
    assert small.num_blocks == int(total_memory(torch.device("cpu")) * fraction) // block_bytes
    with pytest.raises(ModelError, match="holds no KV block"):
        build(tmp_path, kv_blocks=None, kv_memory_fraction=1e-9)


def test_int8_is_refused_where_there_are_no_kernels_for_it() -> None:
    pool = PoolConfig(path="any", quantization=Quantization.INT8)
    assert weight_dtype(pool, torch.device("cpu")) is torch.int8
    with pytest.raises(ModelError, match="quantization: int8 is for the CPU only"):
        weight_dtype(pool, torch.device("cuda"))


@pytest.mark.parametrize(
    ("device", "fields", "size"),
    [
        ("cpu", {}, 16),
        ("cpu", {"block_size": 5}, 5),
        ("cuda", {}, 256),
        ("cuda", {"dtype": DType.FLOAT16}, 256),
        ("cuda", {"dtype": DType.FLOAT32}, 16),
        ("cuda", {"dtype": DType.FLOAT32, "block_size": 7}, 7),
        ("cuda", {"block_size": 256}, 256),
    ],
)
def test_the_block_size_is_what_the_devices_attention_reads(device: str, fields: dict[str, Any], size: int) -> None:
    assert block_size_of(PoolConfig(path="any", **fields), torch.device(device)) == size


def test_a_block_size_that_attention_cannot_read_is_refused() -> None:
    with pytest.raises(ModelError, match="block_size: on cuda bfloat16 needs a multiple of 256, got 128"):
        block_size_of(PoolConfig(path="any", block_size=128), torch.device("cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="this machine has no CUDA device"):
        build_runner(PoolConfig(path=str(tmp_path)), Device.CUDA)
