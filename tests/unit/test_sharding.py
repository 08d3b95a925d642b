"""Every head, feature and token belongs to a rank, and what does not divide is spread as evenly as it can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.runtime.checkpoint import load_spec
from cluster.runtime.model_spec import ModelError, ModelSpec
from cluster.runtime.sharding import Shard, split_evenly
from cluster.runtime.weights import load_weights
from tests.fakes import save_tiny_checkpoint

pytestmark = pytest.mark.unit


def spec(heads: int = 9, kv_heads: int = 3, **fields: Any) -> ModelSpec:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 1536,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
        "vocab_size": 49152,
        "max_position_embeddings": 128,
    }
    return ModelSpec.from_pretrained_config(config | fields)


def heads_of(model: ModelSpec, size: int) -> list[tuple[list[int], list[int]]]:
    shards = [Shard.of(model, rank, size) for rank in range(size)]
    return [(list(shard.query_heads), list(shard.kv_heads)) for shard in shards]


def test_kv_groups_that_do_not_divide_are_spread_unevenly() -> None:
    assert heads_of(spec(), 2) == [([0, 1, 2, 3, 4, 5], [0, 1]), ([6, 7, 8], [2])]
    assert heads_of(spec(), 3) == [([0, 1, 2], [0]), ([3, 4, 5], [1]), ([6, 7, 8], [2])]


def test_more_ranks_than_kv_heads_share_them() -> None:
    assert heads_of(spec(), 5) == [([0, 1], [0]), ([2], [0]), ([3, 4], [1]), ([5], [1]), ([6, 7, 8], [2])]
    assert heads_of(spec(8, 1), 4) == [([0, 1], [0]), ([2, 3], [0]), ([4, 5], [0]), ([6, 7], [0])]


def test_the_mlp_and_the_vocabulary_are_split_evenly() -> None:
    shards = [Shard.of(spec(vocab_size=100), rank, 3) for rank in range(3)]
    assert [len(shard.intermediate) for shard in shards] == [512, 512, 512]
    assert [len(shard.vocab) for shard in shards] == [len(shard.output) for shard in shards] == [34, 33, 33]


def test_a_model_with_too_few_heads_is_refused_in_one_sentence() -> None:
    with pytest.raises(ModelError, match="tensor_parallel: the model has 9 attention heads, which 10 ranks cannot"):
        Shard.of(spec(), 0, 10)


@given(total=st.integers(1, 10_000), parts=st.integers(1, 64))
def test_an_even_split_covers_everything_once_and_differs_by_one_at_most(total: int, parts: int) -> None:
    ranges = split_evenly(total, parts)
    assert [index for part in ranges for index in part] == list(range(total))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@given(kv_heads=st.integers(1, 8), group=st.integers(1, 8), size=st.integers(1, 64))
def test_every_query_head_has_one_rank_and_its_kv_head_is_there(kv_heads: int, group: int, size: int) -> None:
    if size > kv_heads * group:
        return
    found = heads_of(spec(kv_heads * group, kv_heads), size)
    assert [head for query_heads, _ in found for head in query_heads] == list(range(kv_heads * group))
    for query_heads, held in found:
        assert query_heads
        assert {head // group for head in query_heads} == set(held)
        assert len(query_heads) % len(held) == 0  # the attention kernels' groups are equal within a rank
    sizes = [len(held) for _, held in found]
    assert max(sizes) - min(sizes) <= 1


def test_ranks_read_parts_that_make_up_the_whole_and_hold_nothing_else(tmp_path: Any) -> None:
    save_tiny_checkpoint(tmp_path, family="qwen2", num_attention_heads=9, num_key_value_heads=3, intermediate_size=83)
    model, cpu = load_spec(tmp_path), torch.device("cpu")
    whole = load_weights(tmp_path, model, torch.float32, cpu)
    parts = [load_weights(tmp_path, model, torch.float32, cpu, shard=Shard.of(model, rank, 2)) for rank in range(2)]
    assert torch.equal(torch.cat([part.embedding.weight for part in parts]), whole.embedding.weight)
    assert torch.equal(torch.cat([part.head.weight for part in parts]), whole.head.weight)
    for layers in zip(whole.layers, *(part.layers for part in parts), strict=True):
        layer, first, second = layers
        assert torch.equal(torch.cat([first.output.weight, second.output.weight], dim=1), layer.output.weight)
        assert torch.equal(torch.cat([first.down.weight, second.down.weight], dim=1), layer.down.weight)
        gates = [torch.cat(pair) for pair in zip(*(split_gate_up(part) for part in (first, second)), strict=True)]
        assert torch.equal(torch.cat(gates), layer.gate_up.weight)
        queries, keys, values = ([part.qkv.weight.split(cut)[i] for part, cut in cuts(first, second)] for i in range(3))
        assert torch.equal(torch.cat([*queries, *keys, *values]), layer.qkv.weight)
    for part in parts:
        matrices = [linear.weight for layer in part.layers for linear in (layer.output, layer.down)]
        for tensor in (part.embedding.weight, part.head.weight, *matrices):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes  # no view of more
    assert sum(part.num_bytes for part in parts) < 1.05 * whole.num_bytes


def split_gate_up(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = layer.gate_up.weight.chunk(2)
    return gate, up


def cuts(first: Any, second: Any) -> list[tuple[Any, list[int]]]:
    """Rows of queries, keys and values of each rank: two KV heads on the first, one on the second."""
    return [(first, [48, 16, 16]), (second, [24, 8, 8])]
