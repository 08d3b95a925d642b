"""The CPU kernel and the torch sampler give the reference's token for every row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cluster.core import sampling as reference
from cluster.messages.request import SamplingParams
from cluster.runtime import sampler_torch
from cluster.runtime.sampler import Sampler
from cluster.runtime.sampler_cpu import CpuSampler
from cluster.runtime.sampler_torch import TorchSampler
from tests.fakes import sampling_batch

pytestmark = pytest.mark.property

SAMPLERS: dict[str, Sampler] = {"cpu": CpuSampler(), "torch": TorchSampler()}
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)

Rows = NDArray[np.float32]

seeds = st.integers(0, 2**64 - 1)
all_params = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    seed=seeds,
    temperature=st.sampled_from([0.0, 1e-7, 1e-5, 0.1, 0.5, 0.7, 1.0, 1.5, 2.0]) | st.floats(0, 4),
    top_p=st.just(1.0) | st.sampled_from([0.1, 0.25, 0.5, 0.9, 0.999]) | st.floats(0, 1, exclude_min=True),
    top_k=st.none() | st.integers(1, 8) | st.integers(1, 400),
    min_p=st.just(0.0) | st.sampled_from([0.05, 0.5, 1.0]) | st.floats(0, 1),
    num_logprobs=st.none() | st.integers(0, 20),
)
# Few distinct values make ties at every cut; both zeros and impossible tokens are among them.
tied_logits = st.sampled_from([0.0, -0.0, 1.0, 2.0, -1.0, 0.5, -math.inf])
any_logits = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-20, 20, width=32) | st.just(-math.inf)


@st.composite
def rows_of_logits(draw: st.DrawFn) -> Rows:
    """Rows that share a vocabulary size around the kernel's block size, each with at least one possible token."""
    vocab = draw(st.integers(1, 6) | st.integers(60, 70) | st.integers(120, 200))
    rows = draw(st.integers(1, 3))
    values = st.lists(draw(st.sampled_from([tied_logits, any_logits])), min_size=vocab, max_size=vocab)
    logits = np.array(draw(st.lists(values, min_size=rows, max_size=rows)), dtype=np.float32)
    logits[:, -1] = np.where(np.isneginf(logits).all(axis=1), 0.0, logits[:, -1])
    return logits


def token_map(vocab: int, seed: int) -> torch.Tensor:
    """Distinct token ids in no order, as a draft's reduced vocabulary is."""
    return torch.from_numpy(np.random.default_rng(seed).permutation(3 * vocab)[:vocab].astype(np.int32))


def check(
    sampler: Sampler,
    logits: Rows,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    ids: torch.Tensor | None = None,
) -> None:
    """Every token and every logprob is the reference's."""
    result = sampler.sample(torch.from_numpy(logits), sampling_batch(params, positions), ids)
    names = None if ids is None else ids.tolist()
    assert not result.faults
    for row, (p, position) in enumerate(zip(params, positions, strict=True)):
        expected = reference.sample(logits[row].tolist(), p, position, names)
        assert result.token_ids[row] == expected
        if p.num_logprobs is not None:
            wanted = reference.logprobs(logits[row].tolist(), expected, p.num_logprobs, names)
            actual = result.logprobs[row]
            assert (actual.token_id, [t for t, _ in actual.top]) == (wanted.token_id, [t for t, _ in wanted.top])
            assert actual.logprob == pytest.approx(wanted.logprob, rel=1e-9, abs=1e-9)
            assert [v for _, v in actual.top] == pytest.approx([v for _, v in wanted.top], rel=1e-9, abs=1e-9)


@each_sampler
@given(logits=rows_of_logits(), data=st.data())
@settings(max_examples=250, deadline=None)
def test_any_row_gives_the_references_token(sampler: Sampler, logits: Rows, data: st.DataObject) -> None:
    params = [data.draw(all_params) for _ in logits]
    positions = [data.draw(st.integers(1, 2**31 - 2)) for _ in logits]
    ids = data.draw(st.none() | st.builds(token_map, st.just(logits.shape[1]), st.integers(0, 9)))
    check(sampler, logits, params, positions, ids)


CORNERS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.99},
    {"top_k": 50},
    {"top_k": 1000, "top_p": 0.95},
    {"min_p": 0.05},
    {"min_p": 0.01, "top_k": 40, "top_p": 0.8, "temperature": 1.3},
]


def random_rows(shape: str, num_rows: int, vocab: int, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num_rows, vocab)) * {"flat": 0.2, "peaked": 3, "rounded": 1, "spread": 1e4}[shape]
    if shape == "rounded":
        logits = np.round(logits)
    if shape == "peaked":  # a few candidates well above the rest, as a language model has
        for row in logits:
            row[rng.integers(0, vocab, 12)] += 8 + rng.exponential(3, 12)
    return logits.astype(np.float32)


@each_sampler
@pytest.mark.parametrize("shape", ["flat", "peaked", "rounded", "spread"])
def test_thousands_of_random_rows_give_the_references_tokens(sampler: Sampler, shape: str) -> None:
    for seed, vocab in enumerate((300, 64, 1000)):
        logits = random_rows(shape, 320, vocab, seed)
        params = [SamplingParams(max_tokens=1, seed=i * 977, **CORNERS[i % len(CORNERS)]) for i in range(320)]
        check(sampler, logits, params, range(1, 321), token_map(vocab, seed) if seed == 2 else None)


def test_rows_of_a_whole_vocabulary_give_the_references_tokens() -> None:
    params = [SamplingParams(max_tokens=1, seed=11, **corner) for corner in CORNERS]
    shapes = [random_rows(shape, 1, 49_152, seed=3) for shape in ("peaked", "flat", "peaked", "rounded")]
    logits = np.concatenate([shapes[i % 4] for i in range(len(CORNERS))])
    expected = [reference.sample(logits[i].tolist(), p, 100 + i) for i, p in enumerate(params)]
    for sampler in SAMPLERS.values():
        result = sampler.sample(torch.from_numpy(logits), sampling_batch(params, range(100, 100 + len(CORNERS))))
        assert result.token_ids.tolist() == expected


@each_sampler
def test_a_rows_token_does_not_depend_on_the_batch(sampler: Sampler) -> None:
    logits = torch.from_numpy(random_rows("peaked", 48, 5000, seed=4))
    params = [SamplingParams(max_tokens=1, seed=i, num_logprobs=3, **CORNERS[i % len(CORNERS)]) for i in range(48)]
    together = sampler.sample(logits, sampling_batch(params, range(1, 49)))
    order = np.random.default_rng(5).permutation(48)
    shuffled = sampler.sample(logits[order], sampling_batch([params[i] for i in order], order + 1))
    assert shuffled.token_ids.tolist() == together.token_ids[order].tolist()
    for i in range(48):
        alone = sampler.sample(logits[i : i + 1], sampling_batch([params[i]], [i + 1]))
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]


def test_torch_takes_several_passes_over_more_rows_than_fit_one(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.from_numpy(random_rows("peaked", 10, 300, seed=6))
    batch = sampling_batch([SamplingParams(max_tokens=1, seed=i, top_p=0.9) for i in range(10)], range(1, 11))
    expected = TorchSampler().sample(logits, batch).token_ids
    monkeypatch.setattr("cluster.runtime.sampler_torch.MAX_ELEMENTS", 1000)
    assert TorchSampler().sample(logits, batch).token_ids.tolist() == expected.tolist()


@pytest.mark.parametrize("num_logprobs", [0, 2])
def test_torch_works_out_logprobs_in_such_passes_too(monkeypatch: pytest.MonkeyPatch, num_logprobs: int) -> None:
    logits = torch.from_numpy(random_rows("peaked", 10, 300, seed=6))
    params = [SamplingParams(max_tokens=1, seed=i, num_logprobs=num_logprobs if i % 3 else None) for i in range(10)]
    batch = sampling_batch(params, range(1, 11))
    expected = TorchSampler().sample(logits, batch).logprobs
    sizes: list[int] = []

    def noting(rows: torch.Tensor, *how: Any) -> Any:
        sizes.append(len(rows))
        return of_chosen(rows, *how)

    of_chosen = sampler_torch._of_chosen
    monkeypatch.setattr(sampler_torch, "_of_chosen", noting)
    monkeypatch.setattr(sampler_torch, "MAX_ELEMENTS", 1000)
    assert TorchSampler().sample(logits, batch).logprobs == expected
    assert sizes == ([3, 3] if num_logprobs == 0 else [])


@each_sampler
def test_a_reduced_vocabulary_sees_the_noise_of_the_token_ids(sampler: Sampler) -> None:
    full = random_rows("peaked", 32, 2000, seed=7)
    ids = token_map(600, seed=8)
    outside = np.ones(2000, dtype=bool)
    outside[ids.numpy()] = False
    masked = np.where(outside, np.float32(-np.inf), full)
    params = [SamplingParams(max_tokens=1, seed=i, **CORNERS[i % len(CORNERS)]) for i in range(32)]
    batch = sampling_batch(params, range(1, 33))
    reduced = sampler.sample(torch.from_numpy(full[:, ids.numpy()]), batch, ids)
    assert reduced.token_ids.tolist() == sampler.sample(torch.from_numpy(masked), batch).token_ids.tolist()


@each_sampler
def test_the_order_of_columns_does_not_matter(sampler: Sampler) -> None:
    logits = torch.from_numpy(random_rows("rounded", 64, 500, seed=9))
    params = [SamplingParams(max_tokens=1, seed=i, num_logprobs=4, **CORNERS[i % len(CORNERS)]) for i in range(64)]
    batch = sampling_batch(params, range(1, 65))
    order = torch.from_numpy(np.random.default_rng(10).permutation(500))
    plain, permuted = sampler.sample(logits, batch), sampler.sample(logits[:, order], batch, order)
    assert permuted.token_ids.tolist() == plain.token_ids.tolist()
    assert {r: [t for t, _ in v.top] for r, v in permuted.logprobs.items()} == {
        r: [t for t, _ in v.top] for r, v in plain.logprobs.items()
    }
