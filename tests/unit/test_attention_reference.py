"""The reference attention against torch's own dense one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cluster.runtime.attention import make_attention
from cluster.runtime.attention.cpu import CpuAttention
from cluster.runtime.attention.reference import attend_one

pytestmark = pytest.mark.unit


def test_a_whole_prompt_agrees_with_dense_causal_attention() -> None:
    query, keys, values = torch.randn(7, 4, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    dense = F.scaled_dot_product_attention(
        query.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(attend_one(query, keys, values), dense.transpose(0, 1))


def test_the_last_rows_alone_see_the_whole_context_before_them() -> None:
    query, keys, values = torch.randn(9, 4, 8), torch.randn(9, 4, 8), torch.randn(9, 4, 8)
    torch.testing.assert_close(attend_one(query[6:], keys, values), attend_one(query, keys, values)[6:])


def test_the_factory_gives_the_cpu_backend_for_the_cpu() -> None:
    assert isinstance(make_attention(torch.device("cpu")), CpuAttention)
