"""Networks of transformers over the paged cache: the logits are their own, and in float32 a row's bits are its own."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.runtime.any_model import load_any_model
from cluster.runtime.generic.model import GenericModel
from cluster.runtime.input_batch import InputBatch
from cluster.runtime.model import Model
from tests.fakes import TINY_VOCAB
from tests.paged_run import BLOCK_SIZE, CPU, SAMPLING, PagedRun, expected_logits, random_tokens, relative_error
from tests.tiny_networks import NETWORKS, save_network

pytestmark = pytest.mark.integration


def load(path: Path, dtype: torch.dtype = torch.float32) -> Model:
    model = load_any_model(path, dtype, CPU, None, None)
    assert isinstance(model, GenericModel)
    return model


@pytest.mark.parametrize("name", NETWORKS)
def test_logits_equal_transformers_and_have_the_same_bits_in_any_batch(name: str, tmp_path: Path) -> None:
    reference = save_network(tmp_path, name)
    model = load(tmp_path)
    tokens, other = random_tokens(50), random_tokens(70, seed=8)
    expected = expected_logits(reference, tokens)

    whole = PagedRun(model, 1, 50).step({0: tokens})
    assert relative_error(whole, expected) < 1e-4

    run = PagedRun(model, 1, 50)
    cuts = [0, 7, 8, 33, 41, *range(42, 51)]  # prefill in chunks that end inside blocks, then decode
    chunked = torch.cat([run.step({0: tokens[start:end]}) for start, end in itertools.pairwise(cuts)])
    assert torch.equal(chunked, whole)

    run = PagedRun(model, 2, 70)
    cuts = [0, 23, 24, 29, 50]  # beside another sequence: a chunk, a decode row, a verification, a chunk
    together = [run.step({1: other[start : end + 3], 0: tokens[start:end]}) for start, end in itertools.pairwise(cuts)]
    lengths = [end - start for start, end in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat([rows[-length:] for rows, length in zip(together, lengths, strict=True)]), whole)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "opt", "mixtral"])
def test_bfloat16_weights_are_close_to_float32(name: str, tmp_path: Path) -> None:
    reference = save_network(tmp_path, name)
    tokens = random_tokens(30)
    model = load(tmp_path, torch.bfloat16)
    logits = PagedRun(model, 1, 30).step({0: tokens})
    assert logits.dtype is torch.float32
    assert relative_error(logits, expected_logits(reference, tokens)) < 0.04


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 0.005), (torch.int8, 0.05)], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_other_weights_are_close_to_float32_and_keep_a_rows_bits(
    name: str, dtype: torch.dtype, bound: float, tmp_path: Path
) -> None:
    reference = save_network(tmp_path, name)
    tokens = random_tokens(30)
    model = load(tmp_path, dtype)
    logits = PagedRun(model, 1, 30).step({0: tokens})
    assert 0 < relative_error(logits, expected_logits(reference, tokens)) < bound
    run = PagedRun(model, 1, 30)
    assert torch.equal(torch.cat([run.step({0: tokens[:11]}), run.step({0: tokens[11:]})]), logits)


def test_int8_products_take_a_quarter_of_the_bytes_and_embeddings_stay(tmp_path: Path) -> None:
    reference = save_network(tmp_path, "gpt2")
    whole, small = load(tmp_path).weight_bytes, load(tmp_path, torch.int8).weight_bytes
    embeddings = sum(
        4 * module.weight.numel() for module in reference.modules() if isinstance(module, torch.nn.Embedding)
    )
    assert whole == 4 * sum(parameter.numel() for parameter in reference.parameters())
    assert small - embeddings < 0.35 * (whole - embeddings) + TINY_VOCAB * 64  # the head is tied, and quantised apart


def test_a_rejected_guess_is_forgotten_by_writing_over_it(tmp_path: Path) -> None:
    reference = save_network(tmp_path, "gemma3")
    run = PagedRun(load(tmp_path), 1, 40)
    tokens = random_tokens(30)
    run.step({0: tokens[:20]})
    run.step({0: [tokens[20], 5, 6, 7, 8]})
    run.done[0] = 21
    assert relative_error(run.step({0: tokens[21:]}), expected_logits(reference, tokens)[21:]) < 1e-4


def test_a_step_without_samples_writes_keys_and_returns_no_rows(tmp_path: Path) -> None:
    reference = save_network(tmp_path, "gpt2")
    run = PagedRun(load(tmp_path), 1, 20)
    tokens = random_tokens(20)
    chunk = ScheduledSequence("0", tuple(tokens[:12]), 0, run.tables[0], 0, SAMPLING)
    with torch.inference_mode():
        nothing = run.model.forward(InputBatch.build(SchedulerOutput((chunk,)), BLOCK_SIZE), run.kv)
    assert nothing.shape == (0, TINY_VOCAB)
    run.done[0] = 12
    assert relative_error(run.step({0: tokens[12:]}), expected_logits(reference, tokens)[12:]) < 1e-4
