"""Which part of a decoder each rank of a tensor-parallel group holds.

    attention   a rank holds whole groups of query heads with their KV head, as evenly as they divide; with more ranks
                than KV heads, each KV head is held by several ranks, which share its query heads
    MLP         as many of the intermediate features as divide evenly, one more on the first ranks
    vocabulary  likewise for the embedding's rows and the head's

With 9 query heads, 3 KV heads and 2 ranks: query heads 0-5 and KV heads 0-1 | query heads 6-8 and KV head 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

from cluster.runtime.model_spec import ModelError, ModelSpec


def split_evenly(total: int, num_parts: int) -> list[range]:
    """Consecutive ranges that cover 0 .. total; the first ones are one longer where it does not divide."""
    size, extra = divmod(total, num_parts)
    starts = [part * size + min(part, extra) for part in range(num_parts + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a decoder."""

    rank: int
    num_ranks: int
    query_heads: range
    kv_heads: range
    intermediate: range  # features inside the MLP
    vocab: range  # rows of the embedding
    output: range  # columns of the logits

    @classmethod
    def of(cls, spec: ModelSpec, rank: int, num_ranks: int) -> Self:
        """Raises ModelError when the model cannot be divided among so many ranks."""
        check_shardable(spec, num_ranks)
        query_heads, kv_heads = _heads(spec, rank, num_ranks)
        return cls(
            rank=rank,
            num_ranks=num_ranks,
            query_heads=query_heads,
            kv_heads=kv_heads,
            intermediate=split_evenly(spec.intermediate_size, num_ranks)[rank],
            vocab=split_evenly(spec.vocab_size, num_ranks)[rank],
            output=split_evenly(spec.output_size, num_ranks)[rank],
        )

    def spec_of(self, spec: ModelSpec) -> ModelSpec:
        """The decoder's layers as this rank computes them: fewer heads, a narrower MLP, the same hidden size."""
        return replace(
            spec,
            num_heads=len(self.query_heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.intermediate),
        )


def check_shardable(spec: ModelSpec, num_ranks: int) -> None:
    """Raises ModelError unless every rank gets something of each part."""
    limits = {
        "attention heads": spec.num_heads,
        "MLP features": spec.intermediate_size,
        "output tokens": spec.output_size,
    }
    for what, most in limits.items():
        if num_ranks > most:
            raise ModelError(f"tensor_parallel: the model has {most} {what}, which {num_ranks} ranks cannot share")


def _heads(spec: ModelSpec, rank: int, num_ranks: int) -> tuple[range, range]:
    """A rank's query heads and KV heads."""
    group = spec.num_heads // spec.num_kv_heads
    if num_ranks <= spec.num_kv_heads:
        kv_heads = split_evenly(spec.num_kv_heads, num_ranks)[rank]
        return range(kv_heads.start * group, kv_heads.stop * group), kv_heads
    holders = split_evenly(num_ranks, spec.num_kv_heads)  # of each KV head
    kv_head, ranks = next((head, ranks) for head, ranks in enumerate(holders) if rank in ranks)
    part = split_evenly(group, len(ranks))[rank - ranks.start]
    first = kv_head * group
    return range(first + part.start, first + part.stop), range(kv_head, kv_head + 1)
