"""The linear kernel: right, and the same bits for a row whatever is computed beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.runtime.cpu_kernels import PackedLinear, default_torch_above_rows, gated_silu, linear, rms_norm
from cluster.runtime.kernels.emit import MULTIPLIES_PAIRS
from cluster.runtime.threads import kernel_team, set_num_threads

pytestmark = pytest.mark.integration

SHAPES = [(64, 64), (37, 70), (3, 576), (1, 16), (130, 7), (1536, 576), (4, 1)]  # out_features, in_features
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]


@pytest.fixture
def restored_threads() -> Iterator[None]:
    threads, torch_threads = kernel_team().num_threads, torch.get_num_threads()
    yield
    set_num_threads(threads)
    torch.set_num_threads(torch_threads)


def weights_of(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return (weight * 40).round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else weight.to(dtype)


def packed_of(shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None = None) -> tuple[PackedLinear, Tensor]:
    """A matrix for the kernel, and what it stands for, in float64."""
    weight = weights_of(shape, dtype)
    if dtype != torch.int8:
        return PackedLinear.pack(weight, bias), weight.double()
    scales = torch.rand(shape[0], generator=torch.Generator().manual_seed(3)) / 40
    return PackedLinear.pack(weight, bias, scales=scales), weight.double() * scales.double()[:, None]


def rows_of(num_rows: int, features: int) -> Tensor:
    return torch.randn((num_rows, features), generator=torch.Generator().manual_seed(2))


def as_multiplied(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Activations with the precision that they are multiplied with, in float64."""
    return (x.bfloat16() if MULTIPLIES_PAIRS and dtype == torch.bfloat16 else x).double()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 5, 7, 13, 200])
def test_product_bias_and_residual_agree_with_float64(
    shape: tuple[int, int], num_rows: int, dtype: torch.dtype
) -> None:
    bias, residual = rows_of(1, shape[0])[0], rows_of(num_rows, shape[0])
    x, (packed, weight) = rows_of(num_rows, shape[1]), packed_of(shape, dtype)
    product = as_multiplied(x, dtype) @ weight.T
    assert_close(linear(x, packed), product)
    assert_close(linear(x, packed_of(shape, dtype, bias)[0], residual), product + bias + residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_for_every_number_of_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    packed, x = packed_of(shape, dtype)[0], rows_of(150, shape[1])
    everything = linear(x, packed)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 11, 97):
        assert torch.equal(linear(x[:num_rows], packed), everything[:num_rows])
    assert torch.equal(linear(x[149:], packed)[0], everything[149])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("restored_threads")
def test_a_row_has_the_same_bits_for_every_number_of_threads(dtype: torch.dtype) -> None:
    packed, x = packed_of((1536, 576), dtype)[0], rows_of(9, 576)
    results = []
    for num_threads in (1, 2, 5):
        set_num_threads(num_threads)
        results.append(linear(x, packed))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_an_output_has_the_same_bits_in_a_slice_of_the_weights() -> None:
    weight, x = weights_of((100, 576), torch.float32), rows_of(3, 576)
    whole, part = linear(x, PackedLinear.pack(weight)), linear(x, PackedLinear.pack(weight[61:99]))
    assert torch.equal(part, whole[:, 61:99])


def test_rows_may_be_a_view_of_wider_ones() -> None:
    wide, packed = rows_of(9, 200), PackedLinear.pack(weights_of((40, 70), torch.float32))
    assert torch.equal(linear(wide[:, 30:100], packed), linear(wide[:, 30:100].contiguous(), packed))


def test_many_rows_of_bfloat16_weights_go_to_torch() -> None:
    weight, x, bias = weights_of((64, 96), torch.bfloat16), rows_of(20, 96), rows_of(1, 64)[0]
    packed = PackedLinear.pack(weight, bias, torch_above_rows=8)
    assert torch.equal(packed(x), F.linear(x.bfloat16(), weight).float() + bias)
    assert torch.equal(packed(x[:8]), PackedLinear.pack(weight, bias)(x[:8]))


def test_float32_weights_never_go_to_torch() -> None:
    assert PackedLinear.pack(weights_of((8, 8), torch.float32), torch_above_rows=0).torch_above_rows is None


def test_the_default_crossover_is_the_same_on_every_call() -> None:
    assert default_torch_above_rows() == default_torch_above_rows()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 15), r"expected float32 \[rows, 16\]"),
        (torch.zeros(2, 16, dtype=torch.float64), "got torch.float64"),
        (torch.zeros(16, 2).T, "adjacent features"),
    ],
)
def test_rows_that_do_not_fit_are_refused(x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear(x, PackedLinear.pack(torch.zeros(4, 16)))


def test_residuals_and_weights_that_do_not_fit_are_refused() -> None:
    packed = PackedLinear.pack(torch.zeros(4, 16))
    with pytest.raises(ValueError, match="residual"):
        linear(torch.zeros(2, 16), packed, torch.zeros(2, 5))
    with pytest.raises(ValueError, match="float64"):
        PackedLinear.pack(torch.zeros(4, 16, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"\(5,\) numbers do not fit"):
        PackedLinear.pack(torch.zeros(4, 16), torch.zeros(5))
    with pytest.raises(ValueError, match="int8 weights need scales"):
        PackedLinear.pack(torch.zeros(4, 16, dtype=torch.int8))
    with pytest.raises(ValueError, match="int8 weights need scales"):
        PackedLinear.pack(torch.zeros(4, 16), scales=torch.ones(4))


@pytest.mark.parametrize("features", [576, 64, 70, 8, 1])
def test_rms_norm_agrees_with_torch_for_rows_and_for_heads(features: int) -> None:
    x, weight = rows_of(74, features) * 30, rows_of(2, features)
    torch.testing.assert_close(rms_norm(x, weight[0], 1e-5), F.rms_norm(x, (features,), weight[0], 1e-5))
    heads = x.view(37, 2, features)
    torch.testing.assert_close(rms_norm(heads, weight, 1e-5), F.rms_norm(heads, (features,), eps=1e-5) * weight)


@pytest.mark.parametrize("features", [1536, 64, 70, 8])
def test_gated_silu_agrees_with_torch(features: int) -> None:
    gate_up = rows_of(37, 2 * features) * 30
    gate, up = gate_up.chunk(2, dim=1)
    torch.testing.assert_close(gated_silu(gate_up), F.silu(gate) * up)


def test_norms_and_activations_of_a_row_do_not_depend_on_other_rows() -> None:
    x = rows_of(400, 576)
    assert torch.equal(rms_norm(x, x[0], 1e-5)[399:], rms_norm(x[399:], x[0], 1e-5))
    assert torch.equal(gated_silu(x)[399:], gated_silu(x[399:]))


def test_norms_and_activations_refuse_what_they_cannot_read() -> None:
    with pytest.raises(ValueError, match="float32 rows"):
        rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-5)
    with pytest.raises(ValueError, match="2 \\* n"):
        gated_silu(torch.zeros(2, 7))
