"""The passes after a step's first one: each sampled token becomes a row of its own, without a plan in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from cluster.core.step import SchedulerOutput
from cluster.runtime.input_batch import HostRows, InputBatch, Int32Array, Int64Array, slots_of
from cluster.runtime.placing import Place, placer
from cluster.runtime.sampler import SamplerOutput


class Confidence:
    """Owns how much more unlikely each sampled row's chain may become."""

    def __init__(self, min_logprob: Sequence[float]) -> None:
        self._min_logprob = list(min_logprob)  # by row

    @classmethod
    def of(cls, step: SchedulerOutput) -> Self:
        """Of a step whose sequences have one sample at most."""
        return cls([item.min_logprob for item in step.scheduled if item.num_samples])

    def holds_after(self, sampled: SamplerOutput) -> bool:
        """Whether the chain is to go on after a pass: no row has a fault, and none has become too unlikely."""
        for row, token in sampled.logprobs.items():
            self._min_logprob[row] -= token.logprob
        return not sampled.faults and max(self._min_logprob) <= 0


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Holds what P passes will read of S sequences, worked out at once so that little is left to do between them.

    first pass      | a: rows .... its sample's | b: rows that sample nothing | c: its sample's |
    pass 0          | a: one row | c: one row |     at the position that the sample before it is for
    pass 1          | a          | c          |     at the next one
    """

    positions: Int64Array  # [P + 1, S]; the last ones are only sampled for
    slots: Int64Array  # [P, S]
    context_len: Int32Array  # [P, S]
    common: InputBatch  # the first of the passes, for all that does not differ between them
    on_device: Place

    @classmethod
    def after(cls, first: InputBatch, num_passes: int, block_size: int, device: torch.device) -> Self:
        """Follow a batch whose sequences have one sample at most, and slots for `num_passes` more tokens."""
        owner = np.searchsorted(first.host.query_start, first.host.sample_rows, side="right") - 1
        table, rows = first.host.block_table[owner], np.arange(len(owner))
        positions = first.sampling.position + np.arange(num_passes + 1)[:, np.newaxis]
        slots = slots_of(table, rows, positions[:-1], block_size)
        context_len = positions[1:].astype(np.int32)
        query_start = np.arange(len(owner) + 1, dtype=np.int32)
        host = HostRows(rows, rows, positions[0], slots[0], query_start, context_len[0], table)
        return cls(positions, slots, context_len, InputBatch.place(host, first.sampling, device), placer(device))

    def batch(self, index: int, token_ids: Int64Array) -> InputBatch:
        """The index-th pass, over the tokens sampled before it, int64 [S]."""
        common, host, on_device = self.common, self.common.host, self.on_device
        positions, slots, context_len = self.positions[index], self.slots[index], self.context_len[index]
        return InputBatch(
            token_ids=on_device(token_ids),
            positions=on_device(positions),
            slot_mapping=on_device(slots),
            query_start=common.query_start,
            context_len=on_device(context_len),
            block_table=common.block_table,
            sample_rows=common.sample_rows,
            host=HostRows(
                token_ids, host.sample_rows, positions, slots, host.query_start, context_len, host.block_table
            ),
            max_query_len=1,
            max_context_len=max(context_len.tolist()),
            sampling=replace(common.sampling, position=self.positions[index + 1]),
        )
