"""Sampled frequencies against exact probabilities, alone and through speculation. Seeds are fixed: no test is flaky."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from cluster.core.acceptance import accept_equal
from cluster.core.sampling import kept_weights
from cluster.messages.request import SamplingParams
from cluster.runtime.sampler_cpu import CpuSampler
from cluster.runtime.sampling_batch import NO_TOP_K, SamplingBatch

pytestmark = pytest.mark.integration

LEVEL = 1e-4
SAMPLER = CpuSampler()

Tokens = NDArray[np.int64]


def batch_of(how: SamplingParams, seeds: NDArray[np.uint64], positions: Tokens) -> SamplingBatch:
    rows, none = len(positions), np.zeros(0, np.int64)
    return SamplingBatch(
        temperature=np.full(rows, how.temperature),
        top_p=np.full(rows, how.top_p),
        top_k=np.full(rows, NO_TOP_K if how.top_k is None else how.top_k, np.int64),
        min_p=np.full(rows, how.min_p),
        seed=seeds,
        position=positions,
        logprob_rows=none,
        num_logprobs=none,
    )


def draw(logits: NDArray[np.float32], how: SamplingParams, seeds: NDArray[np.uint64], positions: Tokens) -> Tokens:
    """One token per row: row i of logits at (seeds[i], positions[i])."""
    return SAMPLER.sample(torch.from_numpy(logits), batch_of(how, seeds, positions)).token_ids


def over_positions(num_rows: int, seed: int) -> tuple[NDArray[np.uint64], Tokens]:
    return np.full(num_rows, seed, np.uint64), np.arange(1, num_rows + 1)


def over_seeds(num_rows: int, position: int) -> tuple[NDArray[np.uint64], Tokens]:
    return np.arange(num_rows, dtype=np.uint64), np.full(num_rows, position)


LOGITS = np.array([0.3, -1.2, 2.0, 1.9, -3.0, 0.3, 0.9, -0.4], dtype=np.float32)
FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.8},
    {"top_k": 3},
    {"top_p": 0.75},
    {"min_p": 0.15},
    {"temperature": 0.8, "min_p": 0.02, "top_k": 6, "top_p": 0.93},
]


@pytest.mark.parametrize("where", [over_positions(40_000, 12), over_seeds(40_000, 7)], ids=["positions", "seeds"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_frequencies_are_those_of_the_filtered_softmax(
    filters: dict[str, float], where: tuple[NDArray[np.uint64], Tokens]
) -> None:
    how = SamplingParams(max_tokens=1, seed=0, **filters)  # type: ignore[arg-type]
    weights = kept_weights(LOGITS.tolist(), how)
    tokens = draw(np.tile(LOGITS, (40_000, 1)), how, *where)
    counts = np.bincount(tokens, minlength=len(LOGITS))
    expected = np.array([weights.get(v, 0.0) for v in range(len(LOGITS))])
    assert not counts[expected == 0].any()
    kept = expected > 0
    assert stats.chisquare(counts[kept], expected[kept] / expected.sum() * 40_000).pvalue > LEVEL


def test_an_unfiltered_row_of_a_large_vocabulary_reaches_its_tail() -> None:
    rng = np.random.default_rng(3)
    logits = (rng.normal(size=20_000) * 2).astype(np.float32)
    probabilities = np.exp(logits - logits.max(), dtype=np.float64)
    probabilities /= probabilities.sum()
    tokens = draw(np.tile(logits, (3000, 1)), SamplingParams(max_tokens=1, seed=0), *over_positions(3000, 5))
    order = np.argsort(-probabilities)  # twenty groups of about equal probability, from the top to the tail
    group = np.empty(20_000, np.int64)
    group[order] = np.minimum((np.cumsum(probabilities[order]) * 20).astype(np.int64), 19)
    expected = np.bincount(group, weights=probabilities, minlength=20) * 3000
    assert stats.chisquare(np.bincount(group[tokens], minlength=20), expected).pvalue > LEVEL


def test_tokens_at_neighbouring_positions_are_independent() -> None:
    tokens = draw(np.tile(LOGITS, (60_000, 1)), SamplingParams(max_tokens=1, seed=0), *over_positions(60_000, 99))
    table = np.zeros((8, 8))
    np.add.at(table, (tokens[:-1], tokens[1:]), 1)
    assert stats.chi2_contingency(table).pvalue > LEVEL


# --- speculation -----------------------------------------------------------------------------------------------------

NUM_TOKENS = 4
NUM_SEEDS = 12_000
PROMPT_LEN = 3


def table_of_logits(seed: int, scale: float) -> NDArray[np.float32]:
    """A language model of order two over four tokens: [token before last, last token] → logits."""
    return (np.random.default_rng(seed).normal(size=(NUM_TOKENS, NUM_TOKENS, NUM_TOKENS)) * scale).astype(np.float32)


TARGET = table_of_logits(1, 1.2)
DRAFTS = {
    "related": (TARGET + table_of_logits(2, 0.5)).astype(np.float32),
    "unrelated": table_of_logits(3, 2.0),
    "the target itself": TARGET,
}


def next_tokens(model: NDArray[np.float32], history: Tokens, how: SamplingParams, num_output: int) -> Tokens:
    """Sample one more token for every seed; history [seeds, prompt + output]."""
    logits = np.ascontiguousarray(model[history[:, -2], history[:, -1]])
    return draw(logits, how, *over_seeds(len(history), PROMPT_LEN + num_output))


def decode(model: NDArray[np.float32], history: Tokens, how: SamplingParams, count: int, first: int = 0) -> Tokens:
    """`count` more tokens for every seed, [seeds, count], from output position `first` on."""
    for i in range(count):
        history = np.column_stack((history, next_tokens(model, history, how, first + i)))
    return history[:, history.shape[1] - count :]


def speculate(draft: NDArray[np.float32], how: SamplingParams, num_guesses: int) -> list[tuple[int, ...]]:
    """What one verification emits, for every seed."""
    prompt = np.zeros((NUM_SEEDS, PROMPT_LEN), np.int64)
    guesses = decode(draft, prompt, how, num_guesses)
    history = np.column_stack((prompt, guesses))
    samples = np.column_stack(
        [next_tokens(TARGET, history[:, : PROMPT_LEN + j], how, j) for j in range(num_guesses + 1)]
    )
    rows = zip(guesses.tolist(), samples.tolist(), strict=True)
    return [accept_equal(guessed, sampled).emitted for guessed, sampled in rows]


def exact_pair_probabilities(how: SamplingParams) -> NDArray[np.float64]:
    """The joint probabilities of the first two output tokens, [first, second]."""

    def distribution(before: int, last: int) -> NDArray[np.float64]:
        weights = kept_weights(TARGET[before, last].tolist(), how)
        row = np.array([weights.get(v, 0.0) for v in range(NUM_TOKENS)])
        return row / row.sum()

    first = distribution(0, 0)
    return np.array([first[v] * distribution(0, v) for v in range(NUM_TOKENS)])


MODES: list[dict[str, float]] = [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.05}]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("filters", MODES, ids=str)
def test_two_tokens_through_a_draft_have_the_targets_joint_distribution(filters: dict[str, float], draft: str) -> None:
    how = SamplingParams(max_tokens=1, seed=0, **filters)  # type: ignore[arg-type]
    plain = decode(TARGET, np.zeros((NUM_SEEDS, PROMPT_LEN), np.int64), how, 4)
    pairs = np.zeros((NUM_TOKENS, NUM_TOKENS))
    for seed, emitted in enumerate(speculate(DRAFTS[draft], how, num_guesses=3)):
        assert emitted == tuple(plain[seed, : len(emitted)])  # the very tokens of plain decoding
        second = emitted[1] if len(emitted) > 1 else plain[seed, 1]
        pairs[emitted[0], second] += 1
    expected = exact_pair_probabilities(how) * NUM_SEEDS
    assert not pairs[expected == 0].any()
    possible = expected > 0
    assert stats.chisquare(pairs[possible], expected[possible]).pvalue > LEVEL


def test_a_draft_that_equals_the_target_is_always_accepted() -> None:
    how = SamplingParams(max_tokens=1, seed=0, temperature=1.3, top_p=0.95)
    assert {len(emitted) for emitted in speculate(TARGET, how, num_guesses=5)} == {6}


@pytest.mark.parametrize("noise", [0.1, 0.4, 1.0])
def test_near_distributions_agree_as_often_as_shared_noise_promises(noise: float) -> None:
    rng = np.random.default_rng(17)
    rows, vocab = 6000, 50
    target = (rng.normal(size=(rows, vocab)) * 2).astype(np.float32)
    draft = (target + rng.normal(size=(rows, vocab)) * noise).astype(np.float32)
    how, where = SamplingParams(max_tokens=1, seed=0), over_positions(rows, 21)
    agreed = (draw(target, how, *where) == draw(draft, how, *where)).mean()
    total_variation = np.abs(softmax(target) - softmax(draft)).sum(axis=1) / 2
    promised = ((1 - total_variation) / (1 + total_variation)).mean()
    optimal = (1 - total_variation).mean()
    spread = 4 * math.sqrt(0.25 / rows)
    assert promised - spread < agreed < optimal + spread


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def test_shared_noise_agrees_more_often_than_independent_noise() -> None:
    how = SamplingParams(max_tokens=1, seed=0)
    rows = np.tile(LOGITS, (20_000, 1))
    nearby = rows + np.array([0.2, -0.1] * 4, dtype=np.float32)
    seeds, positions = over_positions(20_000, 3)
    tokens = draw(rows, how, seeds, positions)
    shared = (tokens == draw(nearby, how, seeds, positions)).mean()
    independent = (tokens == draw(nearby, how, seeds + np.uint64(1), positions)).mean()
    assert shared > 0.9 > 0.4 > independent


def test_every_pair_of_tokens_is_reachable_through_an_unrelated_draft() -> None:
    how = SamplingParams(max_tokens=1, seed=0, temperature=1.5)
    emitted = {tokens[:2] for tokens in speculate(DRAFTS["unrelated"], how, num_guesses=2) if len(tokens) > 1}
    assert emitted == set(itertools.product(range(NUM_TOKENS), repeat=2))
