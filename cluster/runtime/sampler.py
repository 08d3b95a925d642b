"""Rows of logits become tokens: one interface, on the CPU by machine code, elsewhere by torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.core.sampling import RowFault
from cluster.core.step import SampledTokens, ScheduledSequence, SchedulerOutput, StepOutput
from cluster.messages.answer import TokenLogprobs
from cluster.runtime.sampling_batch import SamplingBatch


@dataclass(frozen=True, slots=True, eq=False)
class SamplerOutput:
    """What a step's rows became. A row with a fault has no token: its entry in token_ids means nothing."""

    token_ids: NDArray[np.int64]  # [R]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)  # by row, for rows that asked
    faults: Mapping[int, RowFault] = field(default_factory=dict)  # by row


class Sampler(Protocol):
    """Turns logits into tokens as cluster.core.sampling defines it; a row's token depends on that row alone."""

    def sample(
        self, logits: torch.Tensor, batch: SamplingBatch, output_token_ids: torch.Tensor | None = None
    ) -> SamplerOutput:
        """Sample every row.

        logits: float32 [R, V], rows in the batch's order; not changed.
        output_token_ids: integers [V], the token id each column scores, in any order; None: the column's own number.
        Raises ValueError when shapes or types do not fit. A row that cannot be sampled is reported in `faults`.
        """
        ...


def make_sampler(device: torch.device) -> Sampler:
    """The sampler for logits on a device."""
    if device.type == "cpu":
        from cluster.runtime.sampler_cpu import CpuSampler

        return CpuSampler()
    from cluster.runtime.sampler_torch import TorchSampler

    return TorchSampler()


def check_shapes(logits: torch.Tensor, batch: SamplingBatch, output_token_ids: torch.Tensor | None) -> None:
    """Raises ValueError unless the arguments of Sampler.sample fit each other."""
    if logits.dtype != torch.float32 or logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be float32 [rows, vocabulary], got {logits.dtype} {list(logits.shape)}")
    if logits.shape[0] != batch.num_rows:
        raise ValueError(f"{logits.shape[0]} rows of logits for {batch.num_rows} rows of parameters")
    if output_token_ids is not None and output_token_ids.shape != logits.shape[1:]:
        raise ValueError(f"{list(output_token_ids.shape)} token ids for {logits.shape[1]} columns of logits")


def collect_step_output(
    step: SchedulerOutput, sampled: SamplerOutput, chained: Sequence[SamplerOutput] = ()
) -> StepOutput:
    """Give every sequence of the step its samples. A sequence with a faulty row has none: it is in `failed`.

    chained: of the passes after the first. There a fault costs its sequence that sample only: the next step meets it
    again.
    """
    samples: dict[str, SampledTokens] = {}
    failed: dict[str, str] = {}
    stuck: set[str] = set()
    row = 0
    for item in step.scheduled:
        rows = range(row, row + item.num_samples)
        row = rows.stop
        fault = next((sampled.faults[r] for r in rows if r in sampled.faults), None)
        if fault is RowFault.EMPTY and item.token_masks is not None:
            stuck.add(item.request_id)
        elif fault is not None:
            failed[item.request_id] = f"the model's output cannot be sampled: {fault}"
        elif item.num_samples:
            later = [(output, rows.start) for output in chained if rows.start not in output.faults]
            samples[item.request_id] = _sampled(item, [*((sampled, r) for r in rows), *later])
    return StepOutput(samples, failed, frozenset(stuck))


def _sampled(item: ScheduledSequence, places: Sequence[tuple[SamplerOutput, int]]) -> SampledTokens:
    """A sequence's tokens, of rows of the passes' outputs."""
    token_ids = tuple(int(output.token_ids[row]) for output, row in places)
    if item.sampling.num_logprobs is None:
        return SampledTokens(token_ids)
    return SampledTokens(token_ids, tuple(output.logprobs[row] for output, row in places))
