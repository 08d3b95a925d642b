"""The vector type: accuracy of exp, rounding to bfloat16, order of sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cluster.runtime.kernels import emit, simd
from cluster.runtime.kernels.compiling import native

pytestmark = pytest.mark.integration


@native
def _exp_all(source: int, target: int, count: int) -> None:
    for index in range(0, 4 * count, 64):
        simd.store(target + index, simd.exp(simd.load(source + index)))


@native
def _round_all(source: int, target: int, count: int) -> None:
    for index in range(0, count, emit.LANES):
        part = min(emit.LANES, count - index)
        simd.store_bf16_part(target + 2 * index, simd.load_part(source + 4 * index, part), part)


@native
def _sum_and_max(source: int) -> tuple[np.float32, np.float32]:
    value = simd.load(source)
    return simd.lane_sum(value), simd.lane_max(value)


def exp_of(values: np.ndarray) -> np.ndarray:
    values = values.astype(np.float32)
    result = np.empty_like(values)
    _exp_all(values.ctypes.data, result.ctypes.data, values.size)
    return result


def test_exp_is_within_two_parts_in_ten_million_over_its_range() -> None:
    x = np.linspace(-87, 88, 160_000, dtype=np.float32)
    relative = exp_of(x) / np.exp(x.astype(np.float64)) - 1
    assert np.abs(relative).max() < 2e-7


def test_exp_is_exact_at_zero_and_zero_far_below() -> None:
    x = np.array([0, -0.0, -np.inf, -1e30, -200, -87.5] + [0] * 10)
    assert exp_of(x).tolist()[:6] == [1, 1, 0, 0, 0, 0]


def test_exp_saturates_instead_of_overflowing() -> None:
    assert np.isfinite(exp_of(np.full(16, 1e30))).all()


def test_rounding_to_bfloat16_agrees_with_torch() -> None:
    x = torch.cat([torch.randn(1000) * 10.0**power for power in range(-40, 38, 6)])
    ties = (torch.arange(1000, dtype=torch.int32) << 15).view(torch.float32)
    x = torch.cat([x, ties, torch.tensor([torch.inf, -torch.inf, 3.4e38, 0.0, -0.0])])
    rounded = torch.empty(len(x), dtype=torch.bfloat16)
    _round_all(x.data_ptr(), rounded.data_ptr(), len(x))
    assert torch.equal(rounded.view(torch.int16), x.bfloat16().view(torch.int16))


def test_not_a_number_stays_one_in_bfloat16() -> None:
    x = torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    rounded = torch.zeros(2, dtype=torch.bfloat16)
    _round_all(x.data_ptr(), rounded.data_ptr(), 2)
    assert rounded.isnan().all()


def test_lanes_add_up_pairwise_halves_first() -> None:
    x = np.random.default_rng(0).standard_normal(16).astype(np.float32)
    total = x
    for width in (8, 4, 2, 1):
        total = total[:width] + total[width:]
    assert _sum_and_max(x.ctypes.data) == (total[0], x.max())
