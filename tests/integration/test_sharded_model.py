"""Ranks together compute what one device does: every rank a thread here, joined as processes are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore

from cluster.runtime.sharded_model import load_shard
from cluster.runtime.tensor_parallel import TPGroup
from tests.fakes import save_tiny_checkpoint, save_tiny_draft
from tests.integration.test_model_logits import load
from tests.paged_run import CPU, PagedRun, expected_logits, random_tokens, relative_error

pytestmark = pytest.mark.integration

UNEVEN = {
    "hidden_size": 72,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 83,
}  # SmolLM2's heads
FAMILIES: dict[str, dict[str, Any]] = {
    "llama with tied embeddings": {"family": "llama", "tie_word_embeddings": True, **UNEVEN},
    "llama with biases everywhere": {"family": "llama", "attention_bias": True, "mlp_bias": True, **UNEVEN},
    "mistral with one KV head": {"family": "mistral", "sliding_window": None, "num_key_value_heads": 1},
    "qwen2": {"family": "qwen2", **UNEVEN},
    "qwen3": {"family": "qwen3", **UNEVEN},
}
Steps = Sequence[dict[int, Sequence[int]]]


def run_ranks(
    path: Path,
    folder: Path,
    size: int,
    runs: Sequence[Steps],
    target: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Rank 0's logits of each run of steps, concatenated; every run starts with empty KV."""
    file = str(folder / f"ranks-{size}-{len(list(folder.iterdir()))}")

    def run_rank(rank: int) -> list[Tensor]:
        group = TPGroup(rank, size, CPU)
        model = load_shard(path, dtype, CPU, group, target)
        group.join(FileStore(file, size), timeout_s=60)
        paged = (PagedRun(model, 4, 64) for _ in runs)  # type: ignore[arg-type]
        return [torch.cat([run.step(pieces) for pieces in steps]) for run, steps in zip(paged, runs, strict=True)]

    with ThreadPoolExecutor(size) as threads:
        return next(iter(threads.map(run_rank, range(size))))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, size: int, tmp_path: Path) -> None:
    model = tmp_path / "model"
    reference = save_tiny_checkpoint(model, **FAMILIES[name])
    tokens = random_tokens(40)
    (logits,) = run_ranks(model, tmp_path, size, [[{0: tokens[:30]}, {0: tokens[30:]}]])
    assert relative_error(logits, expected_logits(reference, tokens)) < 1e-5


@pytest.mark.parametrize("size", [2, 3])
def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch(size: int, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny_checkpoint(model, **UNEVEN)
    mine, other, third = (random_tokens(length, seed=length) for length in (40, 33, 27))
    cuts = [0, 7, 8, 30, *range(35, 41)]
    alone = [{0: mine}]
    chunked = [{0: mine[start:end]} for start, end in itertools.pairwise(cuts)]
    crowded = [{0: mine, 1: other, 2: third}]  # its own rows come first
    one, pieces, crowd = run_ranks(model, tmp_path, size, [alone, chunked, crowded])
    assert torch.equal(one, pieces)
    assert torch.equal(one, crowd[:40])


def test_a_draft_with_its_targets_embedding_and_few_output_tokens_is_divided_too(tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    save_tiny_checkpoint(target)
    save_tiny_draft(draft, vocab=range(3, 60))
    tokens = random_tokens(30)
    whole = PagedRun(load(draft, target_path=target), 1, 40).step({0: tokens})
    for size in (2, 3):
        (logits,) = run_ranks(draft, tmp_path, size, [[{0: tokens}]], target)
        assert logits.shape == (30, 57)
        assert relative_error(logits, whole) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)
def test_other_dtypes_are_divided_too(dtype: torch.dtype, tmp_path: Path) -> None:
    model, tokens = tmp_path / "model", random_tokens(30)
    reference = save_tiny_checkpoint(model, tie_word_embeddings=True, **UNEVEN)
    logits, one_by_one = run_ranks(model, tmp_path, 2, [[{0: tokens}], [{0: [token]} for token in tokens]], dtype=dtype)
    expected = expected_logits(reference, tokens)
    alone = PagedRun(load(model, dtype), 1, 40).step({0: tokens})
    assert relative_error(logits, expected) < 1.3 * relative_error(alone, expected)
    assert torch.equal(logits, one_by_one)
