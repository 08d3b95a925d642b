"""The noise's definition: fixed vectors for other implementations, twins, and its statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from cluster.core import keyed_noise
from cluster.runtime import sampler_torch
from cluster.runtime.kernels import sampling_math

pytestmark = pytest.mark.unit

# The first outputs of the published SplitMix64 for two seeds.
SPLITMIX64 = {
    0: (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC),
    1234567: (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431),
}

# (seed, position, token_id) → bits, noise
VECTORS = {
    (0, 0, 0): (0xA706DD2F4D197E6F, 0.8509171899612384),
    (0, 0, 1): (0xB382A305F4414F5E, 1.0357928357330763),
    (0, 1, 0): (0x46B73E79F0C37C00, -0.25193192759912103),
    (1, 0, 0): (0x5E41AB087439611E, 0.0008428699248495371),
    (42, 17, 49151): (0x2BDD4BE50B1A383A, -0.5676256183525374),
    (0x0123456789ABCDEF, 1_000_000, 128_255): (0xDA2FA0403CF9BD66, 1.8336485592645364),
    (2**64 - 1, 8191, 0): (0x0F43E091A138ECC7, -1.0365969082561632),
}

LEVEL = 1e-4  # of a statistical test; seeds are fixed, so a test that passes once always passes


def bits_grid(seeds: NDArray[np.uint64], positions: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """noise_bits for every combination, [seeds, positions, ids], in numpy."""
    key = _output(seeds[:, None], positions.astype(np.uint64))
    return _output(key[:, :, None], ids.astype(np.uint64))


def _output(seed: NDArray[np.uint64], index: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = seed + (index + np.uint64(1)) * np.uint64(keyed_noise.GAMMA)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(keyed_noise.MULTIPLIER_1)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(keyed_noise.MULTIPLIER_2)
    return value ^ (value >> np.uint64(31))


def uniforms(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def test_the_stream_is_splitmix64() -> None:
    for seed, outputs in SPLITMIX64.items():
        assert tuple(keyed_noise.output(seed, i) for i in range(4)) == outputs


@pytest.mark.parametrize("key", VECTORS, ids=str)
def test_noise_keeps_its_published_values(key: tuple[int, int, int]) -> None:
    bits, noise = VECTORS[key]
    assert keyed_noise.noise_bits(*key) == bits
    assert keyed_noise.gumbel(*key) == pytest.approx(noise, rel=1e-12)


def test_every_implementation_has_the_same_bits_and_noise() -> None:
    rng = np.random.default_rng(1)
    seeds = rng.integers(0, 2**64, 500, dtype=np.uint64, endpoint=False)
    positions, ids = rng.integers(0, 2**31, 500), rng.integers(0, 2**19, 500)
    keys = _output(seeds, positions.astype(np.uint64))
    in_numpy = _output(keys, ids.astype(np.uint64))
    in_torch = sampler_torch.output(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(ids))
    noise_in_torch = sampler_torch.gumbel(torch.from_numpy(keys.view(np.int64))[:, None], torch.from_numpy(ids))
    assert in_torch.numpy().view(np.uint64).tolist() == in_numpy.tolist()
    for i in range(500):
        bits = keyed_noise.noise_bits(int(seeds[i]), int(positions[i]), int(ids[i]))
        noise = keyed_noise.gumbel_of(bits)
        assert in_numpy[i] == bits == sampling_math.output(keys[i], np.uint64(ids[i]))
        assert sampling_math.gumbel_of(np.uint64(bits)) == pytest.approx(noise, rel=1e-15)
        assert noise_in_torch[i, i].item() == pytest.approx(noise, rel=1e-14)


def test_extreme_bits_give_finite_noise_inside_the_stated_limits() -> None:
    for bits in (0, 1, 2**12 - 1, 2**12, 2**63, 2**64 - 2**12, 2**64 - 1):
        assert 0 < keyed_noise.uniform(bits) < 1
        assert keyed_noise.MIN_GUMBEL <= keyed_noise.gumbel_of(bits) <= keyed_noise.MAX_GUMBEL
    assert keyed_noise.uniform(0) + keyed_noise.uniform(2**64 - 1) == 1  # symmetric


def test_the_kernels_bound_never_lies_below_the_noise() -> None:
    rng = np.random.default_rng(2)
    random = rng.integers(0, 2**64, 20_000, dtype=np.uint64, endpoint=False)
    near_one = ~(rng.integers(0, 2**64, 20_000, dtype=np.uint64) >> rng.integers(0, 64, 20_000, dtype=np.uint64))
    for bits in np.concatenate((random, near_one, np.array([0, 2**64 - 1], dtype=np.uint64))):
        bound = float(sampling_math.noise_bound(bits)) + sampling_math.BOUND_OFFSET
        assert bound >= keyed_noise.gumbel_of(int(bits))


def test_the_kernels_bound_is_tight_where_it_matters() -> None:
    for u in (0.5, 0.9, 0.99, 0.999, 0.99999):
        bits = np.uint64(int(u * 2**64))
        bound = float(sampling_math.noise_bound(bits)) + sampling_math.BOUND_OFFSET
        assert bound - keyed_noise.gumbel_of(int(bits)) < 0.45


# --- statistics ------------------------------------------------------------------------------------------------------

AXES = {  # how many neighbouring seeds, positions and token ids
    "token ids of one row": (1, 1, 1 << 16),
    "positions of one token": (1, 1 << 16, 1),
    "seeds at one position and token": (1 << 16, 1, 1),
    "a block of all three": (32, 32, 64),
}


def axis_bits(axis: str) -> NDArray[np.uint64]:
    num_seeds, num_positions, num_ids = AXES[axis]
    return bits_grid(np.arange(num_seeds, dtype=np.uint64), np.arange(num_positions), np.arange(num_ids)).ravel()


@pytest.mark.parametrize("axis", AXES)
def test_noise_is_uniform_along(axis: str) -> None:
    u = uniforms(axis_bits(axis))
    counts = np.bincount((u * 256).astype(np.int64), minlength=256)
    assert stats.chisquare(counts).pvalue > LEVEL
    assert stats.kstest(u, "uniform").pvalue > LEVEL


@pytest.mark.parametrize("axis", AXES)
def test_every_bit_is_fair_along(axis: str) -> None:
    bits = axis_bits(axis)
    ones = np.array([((bits >> np.uint64(i)) & np.uint64(1)).sum() for i in range(64)], dtype=np.float64)
    deviation = (ones - len(bits) / 2) / math.sqrt(len(bits) / 4)
    assert np.abs(deviation).max() < 4.5


@pytest.mark.parametrize("lag", [1, 2, 3, 64])
@pytest.mark.parametrize("axis", AXES)
def test_neighbours_are_independent_along(axis: str, lag: int) -> None:
    u = uniforms(axis_bits(axis))
    first, second = (u[:-lag] * 16).astype(np.int64), (u[lag:] * 16).astype(np.int64)
    table = np.bincount(first * 16 + second, minlength=256).reshape(16, 16)
    assert stats.chi2_contingency(table).pvalue > LEVEL
    assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 4.5 / math.sqrt(len(u))


@pytest.mark.parametrize("changed", ["seed", "position", "token_id"])
def test_one_changed_bit_of_an_input_changes_half_of_the_bits(changed: str) -> None:
    flips = []
    for i in range(400):
        key = {"seed": i * 977, "position": i * 31, "token_id": i * 101}
        other = {**key, changed: key[changed] ^ (1 << (i % 16))}
        flips.append((keyed_noise.noise_bits(**key) ^ keyed_noise.noise_bits(**other)).bit_count())
    assert np.mean(flips) == pytest.approx(32, abs=4.5 * 4 / math.sqrt(400))


def test_rows_of_neighbouring_positions_and_seeds_are_uncorrelated() -> None:
    noise = -np.log(-np.log(uniforms(bits_grid(np.arange(8, dtype=np.uint64), np.arange(8), np.arange(4096)))))
    correlation = np.corrcoef(noise.reshape(64, 4096)) - np.eye(64)
    assert np.abs(correlation).max() < 5 / math.sqrt(4096)


def test_noise_has_the_gumbel_distribution() -> None:
    noise = -np.log(-np.log(uniforms(axis_bits("a block of all three"))))
    assert stats.kstest(noise, "gumbel_r").pvalue > LEVEL


@pytest.mark.parametrize(
    ("seed", "index", "expected"),
    [(0, 1, 0x8858072C497ACFB9), (7, 1, 0x32A809FA9E10B9C7), (7, 7, 0x86B347E027E1D63F), (7, 0, 7)],
)
def test_the_seeds_of_several_outputs_keep_their_published_values(seed: int, index: int, expected: int) -> None:
    assert keyed_noise.choice_seed(seed, index) == expected


def test_outputs_of_neighbouring_seeds_have_seeds_of_their_own() -> None:
    seeds = {keyed_noise.choice_seed(seed, index) for seed in range(1000) for index in range(8)}
    assert len(seeds) == 8000
    assert all(0 <= seed < 2**64 for seed in seeds)
