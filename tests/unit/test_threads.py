"""Thread counts and the OpenMP environment."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from cluster.runtime.cpu_kernels import PackedLinear
from cluster.runtime.threads import (
    OPENMP_ENVIRONMENT,
    default_num_threads,
    kernel_team,
    set_num_threads,
    set_openmp_environment,
)

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _restored_threads() -> Iterator[None]:
    threads, torch_threads = kernel_team().num_threads, torch.get_num_threads()
    yield
    set_num_threads(threads)
    torch.set_num_threads(torch_threads)


def test_one_number_sizes_both_pools() -> None:
    set_num_threads(3)
    assert kernel_team().num_threads == 3
    assert torch.get_num_threads() == 3


def test_no_number_means_all_cores() -> None:
    set_num_threads(3)
    set_num_threads(None)
    assert kernel_team().num_threads == default_num_threads() == torch.get_num_threads()


def test_an_unchanged_size_keeps_the_team() -> None:
    set_num_threads(2)
    team = kernel_team()
    set_num_threads(2)
    assert kernel_team() is team


def test_a_process_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        set_num_threads(0)


def test_the_openmp_environment_fills_gaps_only() -> None:
    environment = {"OMP_WAIT_POLICY": "active"}
    set_openmp_environment(environment)
    assert environment == {**OPENMP_ENVIRONMENT, "OMP_WAIT_POLICY": "active"}


def test_kernels_launched_while_the_team_is_resized_stay_right() -> None:
    rows, packed = torch.ones(3, 64), PackedLinear.pack(torch.ones(256, 64))
    products: list[torch.Tensor] = []
    caller = threading.Thread(target=lambda: products.extend(packed(rows) for _ in range(500)))
    caller.start()
    for num_threads in (1, 2, 3, 4) * 5:
        set_num_threads(num_threads)
    caller.join()
    assert len(products) == 500
    assert all(bool((product == 64).all()) for product in products)
