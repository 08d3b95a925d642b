"""Padded rows in memory that stays where it is, so that a CUDA graph can read each step's own from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.core.step import SchedulerOutput
from cluster.runtime.graph_shapes import GraphShape, GraphShapes
from cluster.runtime.input_batch import HostRows, InputBatch
from cluster.runtime.kv_store import KVCache
from cluster.runtime.sampling_batch import SamplingBatch


def pad_rows(into: HostRows, rows: HostRows, padding_block: int, block_size: int) -> None:
    """Write a step's rows into arrays of a shape that they fit into, and fill the rest.

    What is added writes its keys and values into the padding block, which no sequence holds, and reads only that.
    """
    num_rows = len(rows.token_ids)
    _put(into.token_ids, rows.token_ids, 0)
    _put(into.positions, rows.positions, 0)
    _put(into.slot_mapping, rows.slot_mapping, padding_block * block_size)
    _put(into.sample_rows, rows.sample_rows, 0)
    num_missing = len(into.context_len) - len(rows.context_len)
    _put(into.query_start, rows.query_start, np.arange(num_rows + 1, num_rows + 1 + num_missing))
    _put(into.context_len, rows.context_len, 1)
    num_seqs, width = rows.block_table.shape
    into.block_table[num_seqs:] = padding_block
    into.block_table[:num_seqs, :width] = rows.block_table
    into.block_table[:num_seqs, width:] = 0


def _put(into: NDArray[Any], values: NDArray[Any], rest: int | NDArray[Any]) -> None:
    into[: len(values)] = values
    into[len(values) :] = rest


@dataclass(frozen=True, slots=True, eq=False)
class StaticBatches:
    """Owns one buffer on the host and its copy on the device, laid out anew for each shape: one copy per step.

    words       | token_ids | sample_rows | positions | slot_mapping | query_start, context_len, block_table |
    type        int64 [num_tokens] each                              int32
    """

    host: Tensor  # int64, page-locked where that matters
    device: Tensor  # of the same size
    table_width: int
    padding_block: int
    block_size: int

    @classmethod
    def allocate(cls, shapes: GraphShapes, kv: KVCache, device: torch.device) -> StaticBatches:
        width = shapes.table_width
        size = max((_num_words(shape.num_tokens, shape.num_seqs, width) for shape in shapes.shapes), default=0)
        host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        return cls(host, torch.zeros_like(host, device=device), width, kv.padding_block, kv.block_size)

    def batch(self, shape: GraphShape) -> InputBatch:
        """The batch that a graph of this shape is captured over. Every row is a sample, in the step's order."""
        host = _carve(self.host, shape, self.table_width)
        return InputBatch(
            **_carve(self.device, shape, self.table_width),
            host=HostRows(**{name: tensor.numpy() for name, tensor in host.items()}),
            max_query_len=shape.max_query_len,
            max_context_len=self.table_width * self.block_size,
            sampling=SamplingBatch.build(SchedulerOutput()),
            is_static=True,
        )

    def load(self, rows: HostRows, batch: InputBatch) -> None:
        """Make a step's rows those of a shape's batch. The step before it must be over."""
        pad_rows(batch.host, rows, self.padding_block, self.block_size)
        size = _num_words(batch.num_tokens, len(batch.host.context_len), self.table_width)
        self.device[:size].copy_(self.host[:size], non_blocking=True)


def _num_words(num_tokens: int, num_seqs: int, table_width: int) -> int:
    """Words of 64 bits."""
    return 4 * num_tokens + (2 * num_seqs + 1 + num_seqs * table_width + 1) // 2


def _carve(words: Tensor, shape: GraphShape, table_width: int) -> dict[str, Tensor]:
    """A buffer's parts by the names that HostRows and InputBatch give them."""
    num_tokens, num_seqs = shape.num_tokens, shape.num_seqs
    token_ids, sample_rows, positions, slot_mapping = words[: 4 * num_tokens].view(4, num_tokens)
    halves = words[4 * num_tokens :].view(torch.int32)
    table_size = num_seqs * table_width
    starts, lengths, table = torch.split(halves[: 2 * num_seqs + 1 + table_size], [num_seqs + 1, num_seqs, table_size])
    return {
        "token_ids": token_ids,
        "sample_rows": sample_rows,
        "positions": positions,
        "slot_mapping": slot_mapping,
        "query_start": starts,
        "context_len": lengths,
        "block_table": table.view(num_seqs, table_width),
    }
