"""Sampling on the CPU: hands rows of logits to the sampling kernel."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.core.sampling import RowFault
from cluster.messages.answer import TokenLogprobs
from cluster.runtime.kernels.logit_adjustments import NO_ADJUSTMENTS, Adjustments
from cluster.runtime.kernels.sampling_filters import FAULT_EMPTY, FAULT_INFINITE, FAULT_NAN
from cluster.runtime.kernels.sampling_rows import Changes, Parameters, most_likely, sample_rows
from cluster.runtime.kernels.token_masks import NO_MASKS, Masks
from cluster.runtime.logit_adjustments import LogitAdjustments, columns_of
from cluster.runtime.sampler import SamplerOutput, check_shapes
from cluster.runtime.sampling_batch import SamplingBatch
from cluster.runtime.token_masks import TokenMasks

_FAULTS = {FAULT_NAN: RowFault.NAN, FAULT_INFINITE: RowFault.INFINITE, FAULT_EMPTY: RowFault.EMPTY}


class CpuSampler:
    """Samples in the calling thread, without the GIL. Remembers the columns of the last logits."""

    def __init__(self) -> None:
        self._columns: tuple[torch.Tensor | None, NDArray[np.int32]] = (None, np.zeros(0, np.int32))

    def sample(
        self, logits: torch.Tensor, batch: SamplingBatch, output_token_ids: torch.Tensor | None = None
    ) -> SamplerOutput:
        """See Sampler.sample."""
        check_shapes(logits, batch, output_token_ids)
        rows = logits.detach().contiguous().numpy()
        ids = self._token_ids(logits.shape[1], output_token_ids)
        columns, codes = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.uint8)
        changes = Changes(_adjustments(batch.adjustments, ids), _masks(batch.masks))
        sample_rows(rows, ids, _parameters(batch), changes, columns, codes)
        faults = {row: _FAULTS[code] for row, code in enumerate(codes.tolist()) if code}
        logprobs = {
            row: _logprobs(rows[row], ids, int(columns[row]), num_top)
            for row, num_top in zip(batch.logprob_rows.tolist(), batch.num_logprobs.tolist(), strict=True)
            if row not in faults
        }
        return SamplerOutput(ids[columns].astype(np.int64), logprobs, faults)

    def _token_ids(self, num_columns: int, source: torch.Tensor | None) -> NDArray[np.int32]:
        known, ids = self._columns
        if known is not source or len(ids) != num_columns:
            ids = np.arange(num_columns, dtype=np.int32) if source is None else source.numpy().astype(np.int32)
            self._columns = source, ids
        return ids


def _parameters(batch: SamplingBatch) -> Parameters:
    return Parameters(batch.temperature, batch.top_p, batch.top_k, batch.min_p, batch.seed, batch.position)


def _adjustments(given: LogitAdjustments | None, ids: NDArray[np.int32]) -> Adjustments:
    if given is None:
        return NO_ADJUSTMENTS
    return Adjustments(given.row_start, columns_of(given.token_ids, ids), given.repetition, given.shift)


def _masks(given: TokenMasks | None) -> Masks:
    return NO_MASKS if given is None else Masks(given.mask_of_row, given.words)


def _logprobs(logits: NDArray[np.float32], ids: NDArray[np.int32], chosen: int, num_top: int) -> TokenLogprobs:
    largest, log_total, columns = most_likely(logits, ids, num_top)
    ranked = sorted(columns.tolist(), key=lambda column: (-logits[column], ids[column]))

    def logprob(column: int) -> float:
        return (float(logits[column]) - largest) - log_total

    return TokenLogprobs(int(ids[chosen]), logprob(chosen), tuple((int(ids[c]), logprob(c)) for c in ranked))
