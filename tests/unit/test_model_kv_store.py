"""How much memory the paged cache takes and gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.runtime.kv_store import KVCache, bytes_per_block, cgroup_limits, num_blocks_for, total_memory
from cluster.runtime.model_spec import ModelSpec

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
SPEC = ModelSpec.from_pretrained_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 10,
        "max_position_embeddings": 64,
    }
)


def test_the_cache_is_laid_out_by_layer_block_slot_and_head() -> None:
    kv = KVCache.allocate(SPEC, num_blocks=5, block_size=4, dtype=torch.bfloat16, device=CPU)
    assert [tensor.shape for tensor in kv.keys] == [(5, 4, 2, 8)] * 3
    assert all(tensor.is_contiguous() for tensor in (*kv.keys, *kv.values))
    assert (kv.num_blocks, kv.block_size) == (5, 4)
    kv.keys[1].fill_(1.0)
    assert all(float(tensor.sum()) == 0 for tensor in (kv.keys[0], kv.keys[2], *kv.values))


def test_the_accounting_equals_the_memory_taken() -> None:
    kv = KVCache.allocate(SPEC, num_blocks=5, block_size=4, dtype=torch.bfloat16, device=CPU)
    assert kv.num_bytes == 5 * bytes_per_block(SPEC, 4, torch.bfloat16) == 5 * 4 * (3 * 2 * 2 * 8) * 2


def test_blocks_follow_the_memory_fraction_up_to_what_can_be_used() -> None:
    assert num_blocks_for(0.5, block_bytes=100, total_bytes=10_000, most=1_000) == 50
    assert num_blocks_for(0.5, block_bytes=100, total_bytes=10_000, most=20) == 20
    assert num_blocks_for(0.1, block_bytes=100, total_bytes=900, most=20) == 0


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path) == []
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_limits(tmp_path) == []
    (tmp_path / "memory.max").write_text("123456\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroup_limits(tmp_path) == [123456, 9223372036854771712]


def test_the_machines_memory_is_known() -> None:
    assert total_memory(CPU) > 2**28
