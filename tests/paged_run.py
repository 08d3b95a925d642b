"""Drives a model over paged keys and values, and what to compare its logits with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.messages.request import SamplingParams
from cluster.runtime.input_batch import InputBatch
from cluster.runtime.kv_store import KVCache
from cluster.runtime.model import Model
from tests.fakes import TINY_VOCAB

CPU = torch.device("cpu")
BLOCK_SIZE = 4
SAMPLING = SamplingParams(max_tokens=1, seed=0)


class PagedRun:
    """Feeds sequences to a model piece by piece; each sequence's blocks are scattered over the cache."""

    def __init__(self, model: Model, num_sequences: int, max_len: int, block_size: int = BLOCK_SIZE) -> None:
        self.model = model
        self.block_size = block_size
        per_sequence = -(-max_len // block_size)
        blocks = random.Random(5).sample(range(2 * num_sequences * per_sequence), num_sequences * per_sequence)
        self.tables = [tuple(blocks[i::num_sequences]) for i in range(num_sequences)]
        self.kv = KVCache.allocate(model.spec, 2 * len(blocks), block_size, torch.float32, CPU)
        self.done = [0] * num_sequences

    def step(self, pieces: dict[int, Sequence[int]]) -> Tensor:
        """Run `pieces` (sequence → its next tokens) as one batch; logits of every row, in order."""
        scheduled = tuple(
            ScheduledSequence(
                request_id=str(sequence),
                token_ids=tuple(tokens),
                start=self.done[sequence],
                block_table=self.tables[sequence],
                num_samples=len(tokens),
                sampling=SAMPLING,
            )
            for sequence, tokens in pieces.items()
        )
        for sequence, tokens in pieces.items():
            self.done[sequence] += len(tokens)
        with torch.inference_mode():
            return self.model.forward(InputBatch.build(SchedulerOutput(scheduled), self.block_size), self.kv)


def expected_logits(reference: Any, tokens: Sequence[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor([tokens])).logits[0]
    return logits


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def random_tokens(count: int, seed: int = 3) -> list[int]:
    return random.Random(seed).choices(range(TINY_VOCAB), k=count)
