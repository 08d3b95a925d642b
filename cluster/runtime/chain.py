"""The passes after a step's first one: each sampled token becomes a row of its own, without a plan in between."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from cluster.runtime.input_batch import HostRows, InputBatch, Int32Array, Int64Array, slots_of
from cluster.runtime.placing import placer
from cluster.runtime.sampling_batch import SamplingBatch


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Holds what P passes will read of S sequences, worked out at once so that little is left to do between them.

    first pass      | a: rows .... its sample's | b: rows that sample nothing | c: its sample's |
    pass 0          | a: one row | c: one row |     at the position that the sample before it is for
    pass 1          | a          | c          |     at the next one
    """

    positions: Int64Array  # [P, S]
    slots: Int64Array  # [P, S]
    context_len: Int32Array  # [P, S]
    template: InputBatch  # a pass's batch, but for what differs from pass to pass
    device: torch.device

    @classmethod
    def after(cls, first: InputBatch, num_passes: int, block_size: int, device: torch.device) -> Self:
        """Follow a batch whose sequences have one sample at most, and slots for `num_passes` more tokens."""
        owner = np.searchsorted(first.host.query_start, first.host.sample_rows, side="right") - 1
        num_seqs, table = len(owner), first.host.block_table[owner]
        rows = np.arange(num_seqs)
        positions = first.sampling.position + np.arange(num_passes)[:, np.newaxis]
        slots = slots_of(table, rows, positions, block_size)
        context_len = (positions + 1).astype(np.int32)
        query_start = np.arange(num_seqs + 1, dtype=np.int32)
        host = HostRows(rows, rows, positions[0], slots[0], query_start, context_len[0], table)
        return cls(positions, slots, context_len, InputBatch.place(host, first.sampling, device), device)

    def batch(self, index: int, token_ids: Int64Array) -> InputBatch:
        """The index-th pass, over the tokens sampled before it, int64 [S]."""
        template, on_device = self.template, placer(self.device)
        positions, slots, context_len = self.positions[index], self.slots[index], self.context_len[index]
        sampling: SamplingBatch = replace(template.sampling, position=positions + 1)
        return replace(
            template,
            token_ids=on_device(token_ids),
            positions=on_device(positions),
            slot_mapping=on_device(slots),
            context_len=on_device(context_len),
            host=replace(
                template.host,
                token_ids=token_ids,
                positions=positions,
                slot_mapping=slots,
                context_len=context_len,
            ),
            max_context_len=int(context_len.max()),
            sampling=sampling,
        )
