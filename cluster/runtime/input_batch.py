"""One step's rows as flat tensors: what the model, the attention kernels and the sampler read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.runtime.placing import placer
from cluster.runtime.sampling_batch import SamplingBatch

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class HostRows:
    """The batch's index arrays in host memory, where numba kernels and launch code read them.

    On the CPU the tensors of the same name in InputBatch share this memory.
    """

    token_ids: Int64Array  # [num_tokens]
    sample_rows: Int64Array  # [num_samples]
    positions: Int64Array  # [num_tokens]
    slot_mapping: Int64Array  # [num_tokens]
    query_start: Int32Array  # [num_seqs + 1]
    context_len: Int32Array  # [num_seqs]
    block_table: Int32Array  # [num_seqs, max_blocks]

    @classmethod
    def locate(
        cls,
        token_ids: Int64Array,
        sample_rows: Int64Array,
        query_start: Int32Array,
        context_len: Int32Array,
        block_table: Int32Array,
        block_size: int,
    ) -> HostRows:
        """Work out each row's position and slot from its sequence's."""
        lengths = np.diff(query_start)
        owner = np.repeat(np.arange(len(lengths)), lengths)  # [num_tokens] index of each row's sequence
        positions = np.arange(len(owner), dtype=np.int64) + (context_len - query_start[1:])[owner]
        slots = slots_of(block_table, owner, positions, block_size)
        return cls(token_ids, sample_rows, positions, slots, query_start, context_len, block_table)


def slots_of(block_table: Int32Array, owner: Int64Array, positions: Int64Array, block_size: int) -> Int64Array:
    """The slot of each row, given its position and the index of its sequence; shapes broadcast."""
    offsets = positions % block_size
    return block_table[owner, positions // block_size].astype(np.int64) * block_size + offsets


@dataclass(frozen=True, slots=True, eq=False)
class InputBatch:
    """The rows of one step, sequence after sequence, and how each sampled row becomes a token.

    rows        | sequence 0: query_start[0] .. query_start[1] | sequence 1 ... |
    row i       token_ids[i] at absolute positions[i]; its key and value go to slot_mapping[i]
    slot        block_id * block_size + offset
    attention   row i of sequence s sees positions 0 .. positions[i]; context_len[s] = its last row's position + 1
    samples     sample r reads the logits of row sample_rows[r]
    """

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slot_mapping: Tensor  # int64 [num_tokens]
    query_start: Tensor  # int32 [num_seqs + 1]
    context_len: Tensor  # int32 [num_seqs]
    block_table: Tensor  # int32 [num_seqs, max_blocks], zero past a sequence's own blocks
    sample_rows: Tensor  # int64 [num_samples]
    host: HostRows
    max_query_len: int
    max_context_len: int
    sampling: SamplingBatch
    is_static: bool = False  # values change with each replay of a graph: none may be read while it is captured

    @property
    def num_tokens(self) -> int:
        return len(self.host.positions)

    @property
    def num_samples(self) -> int:
        return self.sampling.num_rows

    @classmethod
    def build(cls, step: SchedulerOutput, block_size: int, device: torch.device = CPU) -> InputBatch:
        """Flatten a step. Every sequence must have at least one token and a block table that covers its rows."""
        return cls.place(_host_rows(step.scheduled, block_size), SamplingBatch.build(step), device)

    @classmethod
    def place(cls, host: HostRows, sampling: SamplingBatch, device: torch.device = CPU) -> InputBatch:
        """Put rows on the device."""
        on_device = placer(device)
        return cls(
            token_ids=on_device(host.token_ids),
            positions=on_device(host.positions),
            slot_mapping=on_device(host.slot_mapping),
            query_start=on_device(host.query_start),
            context_len=on_device(host.context_len),
            block_table=on_device(host.block_table),
            sample_rows=on_device(host.sample_rows),
            host=host,
            max_query_len=max((end - start for start, end in pairwise(host.query_start.tolist())), default=0),
            max_context_len=max(host.context_len.tolist(), default=0),
            sampling=sampling,
        )


def _flat_token_ids(items: Sequence[ScheduledSequence]) -> Int64Array:
    return np.array([token for item in items for token in item.token_ids], dtype=np.int64)


def _host_rows(items: Sequence[ScheduledSequence], block_size: int) -> HostRows:
    ends = list(accumulate(len(item.token_ids) for item in items))
    return HostRows.locate(
        _flat_token_ids(items),
        _sample_rows(items, ends),
        np.array([0, *ends], dtype=np.int32),
        np.array([item.start + len(item.token_ids) for item in items], dtype=np.int32),
        _block_table(items),
        block_size,
    )


def _block_table(items: Sequence[ScheduledSequence]) -> Int32Array:
    width = max((len(item.block_table) for item in items), default=0)
    table = np.zeros((len(items), width), dtype=np.int32)
    for row, item in zip(table, items, strict=True):
        row[: len(item.block_table)] = item.block_table
    return table


def _sample_rows(items: Sequence[ScheduledSequence], ends: Sequence[int]) -> Int64Array:
    return np.array(
        [row for item, end in zip(items, ends, strict=True) for row in range(end - item.num_samples, end)],
        dtype=np.int64,
    )
