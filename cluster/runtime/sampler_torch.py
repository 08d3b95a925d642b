"""Sampling where the logits are, in torch operations: the same tokens as cluster.core.sampling, on any device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.core import keyed_noise
from cluster.core.sampling import GREEDY_BELOW, WEIGHT_SCALE, RowFault
from cluster.messages.answer import TokenLogprobs
from cluster.runtime.logit_adjustments import LogitAdjustments, columns_of
from cluster.runtime.placing import placer
from cluster.runtime.sampler import SamplerOutput, check_shapes
from cluster.runtime.sampling_batch import NO_TOP_K, SamplingBatch
from cluster.runtime.token_masks import TokenMasks

MAX_ELEMENTS = 2**24  # of the double-precision temporaries of one pass; more rows take several passes

_NO_ID = 2**62  # more than any token id


class _Rows(NamedTuple):
    """Some rows' parameters, on the device, and what the host knows of them, so that no step waits for the device."""

    scale: Tensor  # float64 [R, 1], 1 / temperature
    floor: Tensor  # float64 [R, 1], ln(min_p)
    top_k: Tensor  # int64 [R, 1]
    top_p: Tensor  # float64 [R, 1]
    key: Tensor  # int64 [R, 1], the bits of the noise's row key
    greedy: Tensor  # bool [R]
    any_noise: bool
    any_ranking: bool  # top_k or top_p


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """Token ids of the logits' columns, ascending, so that the first of equals has the lowest id."""

    source: Tensor | None  # what they were made from; None: column i is token i
    ids: Tensor  # int64 [V]
    host_ids: NDArray[np.int64]  # the same
    order: Tensor | None  # which column of the model each of them is; None: the same

    @classmethod
    def of(cls, logits: Tensor, source: Tensor | None) -> _Columns:
        if source is None:
            ids, order = torch.arange(logits.shape[1], device=logits.device), None
        else:
            ids, order = source.to(logits.device, torch.int64).sort()
        return cls(source, ids, ids.cpu().numpy(), order)

    def describe(self, logits: Tensor, source: Tensor | None) -> bool:
        """Whether they are those of such logits too."""
        return source is self.source and len(self.ids) == logits.shape[1] and self.ids.device == logits.device


class TorchSampler:
    """Samples in torch operations, with one wait for the device at the end of a step.

    Rows that want logprobs wait once more, each for itself if it wants those of other tokens than its own. Remembers
    the columns of the last logits.
    """

    def __init__(self) -> None:
        self._columns: _Columns | None = None

    def sample(self, logits: Tensor, batch: SamplingBatch, output_token_ids: Tensor | None = None) -> SamplerOutput:
        """See Sampler.sample."""
        check_shapes(logits, batch, output_token_ids)
        if self._columns is None or not self._columns.describe(logits, output_token_ids):
            self._columns = _Columns.of(logits, output_token_ids)
        ids, order = self._columns.ids, self._columns.order
        logits = logits if order is None else logits[:, order]
        changed = logits if batch.adjustments is None else _adjusted(logits, self._columns.host_ids, batch.adjustments)
        changed = changed if batch.masks is None else _masked(changed, ids, batch.masks)
        num_rows = _rows_per_pass(logits)
        starts = range(0, len(logits), num_rows)
        parts = [_sample(changed[i : i + num_rows], ids, _rows(batch, i, i + num_rows, logits.device)) for i in starts]
        columns, codes = torch.cat(parts, dim=1).cpu().numpy() if parts else np.zeros((2, 0), dtype=np.int64)
        faults = {row: _FAULTS[code] for row, code in enumerate(codes.tolist()) if code}
        wanted = zip(batch.logprob_rows.tolist(), batch.num_logprobs.tolist(), strict=True)
        logprobs = _logprobs(logits, ids, columns, {row: num_top for row, num_top in wanted if row not in faults})
        return SamplerOutput(self._columns.host_ids[columns], logprobs, faults)


def _adjusted(logits: Tensor, host_ids: NDArray[np.int64], adjustments: LogitAdjustments) -> Tensor:
    """A copy of the logits with what penalties, biases and min_tokens change."""
    columns = columns_of(adjustments.token_ids, host_ids)
    exist = columns >= 0
    rows = np.repeat(np.arange(len(logits)), np.diff(adjustments.row_start))
    on_device = placer(logits.device)

    def entries(values: NDArray[np.generic]) -> Tensor:
        return on_device(values[exist])

    where = entries(rows), entries(columns)
    given, repetition = logits[where].double(), entries(adjustments.repetition)
    scaled = torch.where(given > 0, given / repetition, given * repetition)
    result = logits.clone()
    result[where] = (scaled + entries(adjustments.shift)).float()
    return result


def _masked(logits: Tensor, ids: Tensor, masks: TokenMasks) -> Tensor:
    """A copy of the logits with -inf for what the rows' masks do not allow."""
    on_device = placer(logits.device)
    words = on_device(masks.words.view(np.int32).copy())  # [M, W]
    known = ids < 32 * words.shape[1]
    bits = words[:, torch.where(known, ids >> 5, 0)] >> (ids & 31)  # [M, V]
    rows = on_device(np.flatnonzero(masks.mask_of_row >= 0))
    result = logits.clone()
    result[rows] = logits[rows].masked_fill(((bits & 1) == 0) | ~known, -math.inf)
    return result


def _rows(batch: SamplingBatch, start: int, stop: int, device: torch.device) -> _Rows:
    rows = slice(start, stop)
    greedy = batch.temperature[rows] < GREEDY_BELOW
    floors = [math.log(min_p) if min_p > 0 else -math.inf for min_p in batch.min_p[rows].tolist()]
    on_device = placer(device)

    def column(values: NDArray[np.generic]) -> Tensor:
        return on_device(values).unsqueeze(1)

    return _Rows(
        scale=column(1.0 / np.where(greedy, 1.0, batch.temperature[rows])),
        floor=column(np.array(floors)),
        top_k=column(batch.top_k[rows]),
        top_p=column(batch.top_p[rows]),
        key=column(_row_keys(batch.seed[rows], batch.position[rows])),
        greedy=column(greedy).squeeze(1),
        any_noise=not greedy.all(),
        any_ranking=bool(((batch.top_k[rows] < NO_TOP_K) | (batch.top_p[rows] < 1)).any()),
    )


def _row_keys(seed: NDArray[np.uint64], position: NDArray[np.int64]) -> NDArray[np.int64]:
    keys = [keyed_noise.row_key(s, p) for s, p in zip(seed.tolist(), position.tolist(), strict=True)]
    return np.array(keys, dtype=np.uint64).view(np.int64)


# --- a pass over some rows -------------------------------------------------------------------------------------------

_FAULTS = {1: RowFault.NAN, 2: RowFault.INFINITE, 3: RowFault.EMPTY}


def _sample(logits: Tensor, ids: Tensor, rows: _Rows) -> Tensor:
    """Columns and fault codes of the sampled tokens, int64 [2, R]."""
    top = logits.amax(dim=1, keepdim=True)
    columns = _first_column(logits == top)
    if rows.any_noise:
        columns = torch.where(rows.greedy, columns, _draw(logits, top, ids, rows))
    codes = torch.where(top == math.inf, 2, torch.where(top == -math.inf, 3, 0))
    codes = torch.where(logits.isnan().any(dim=1, keepdim=True), 1, codes)
    return torch.stack((columns, codes.squeeze(1)))


def _first_column(chosen: Tensor) -> Tensor:
    """The first true column of each row; argmax promises nothing about equals."""
    columns = torch.arange(chosen.shape[1], device=chosen.device)
    return torch.where(chosen, columns, _NO_ID).amin(dim=1).clamp(max=chosen.shape[1] - 1)


def _draw(logits: Tensor, top: Tensor, ids: Tensor, rows: _Rows) -> Tensor:
    """The columns whose x + noise is the largest of those kept."""
    x = (logits.double() - top.double()) * rows.scale  # [R, V]
    kept = x >= torch.clamp(rows.floor, min=torch.finfo(x.dtype).min)  # -inf is never kept
    if rows.any_ranking:
        kept = _rank_filters(logits, x, kept, rows)
    scores = torch.where(kept, x + gumbel(rows.key, ids), -math.inf)
    return _first_column(scores == scores.amax(dim=1, keepdim=True))


def _rank_filters(logits: Tensor, x: Tensor, kept: Tensor, rows: _Rows) -> Tensor:
    """What top_k and then top_p leave of `kept`, bool [R, V]."""
    order = (logits + 0.0).sort(dim=1, descending=True, stable=True).indices  # + 0.0: the zeros are equal
    ranks = torch.arange(logits.shape[1], device=logits.device)
    ranked = kept.gather(1, order) & (ranks < rows.top_k)
    weights = (x.gather(1, order).exp() * WEIGHT_SCALE).round().long() * ranked
    reached = weights.cumsum(dim=1)
    needed = (rows.top_p * reached[:, -1:]).clamp(min=0.5)
    ranked &= (reached - weights < needed) | (rows.top_p >= 1)
    return torch.zeros_like(kept).scatter(1, order, ranked)


# --- noise -----------------------------------------------------------------------------------------------------------


def gumbel(key: Tensor, ids: Tensor) -> Tensor:
    """keyed_noise.gumbel_of for every row key [R, 1] and token id [V]: float64 [R, V]."""
    bits = output(key, ids)
    uniform = (_shift_right(bits, 64 - keyed_noise.UNIFORM_BITS).double() + 0.5) * 2.0**-keyed_noise.UNIFORM_BITS
    return -(-uniform.log()).log()


def output(key: Tensor, index: Tensor) -> Tensor:
    """keyed_noise.output on int64 tensors, whose arithmetic wraps as that of unsigned integers does."""
    value = key + (index + 1) * _signed(keyed_noise.GAMMA)
    value = (value ^ _shift_right(value, 30)) * _signed(keyed_noise.MULTIPLIER_1)
    value = (value ^ _shift_right(value, 27)) * _signed(keyed_noise.MULTIPLIER_2)
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, places: int) -> Tensor:
    """A shift that fills with zeros, which torch has only for unsigned integers."""
    shifted: Tensor = (value >> places) & (2 ** (64 - places) - 1)
    return shifted


def _rows_per_pass(logits: Tensor) -> int:
    return max(1, MAX_ELEMENTS // logits.shape[1])


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


# --- logprobs --------------------------------------------------------------------------------------------------------


def _logprobs(
    logits: Tensor, ids: Tensor, columns: NDArray[np.int64], num_top: Mapping[int, int]
) -> dict[int, TokenLogprobs]:
    """By row; num_top: how many other tokens' each row wants, of the rows that want any."""
    alone = [row for row, number in num_top.items() if number == 0]
    found = {row: _ranked(logits[row], ids, int(columns[row]), number) for row, number in num_top.items() if number}
    num_rows = _rows_per_pass(logits)
    for start in range(0, len(alone), num_rows):
        rows = alone[start : start + num_rows]
        found |= zip(rows, _of_chosen(logits[rows], ids, columns[rows]), strict=True)
    return found


def _of_chosen(logits: Tensor, ids: Tensor, columns: NDArray[np.int64]) -> list[TokenLogprobs]:
    """Of the chosen tokens of all rows at once."""
    chosen = placer(logits.device)(columns).unsqueeze(1)
    x = logits.double() - logits.amax(dim=1, keepdim=True).double()
    totals = (x.exp() * WEIGHT_SCALE).round().long().sum(dim=1).double()  # exact: far below 2**53
    parts = torch.stack((ids[chosen].squeeze(1).double(), x.gather(1, chosen).squeeze(1), totals), dim=1)
    return [TokenLogprobs(int(token), own - math.log(total / WEIGHT_SCALE), ()) for token, own, total in parts.tolist()]


def _ranked(logits: Tensor, ids: Tensor, chosen: int, num_top: int) -> TokenLogprobs:
    x = logits.double() - logits.amax().double()
    log_total = math.log(int((x.exp() * WEIGHT_SCALE).round().long().sum()) / WEIGHT_SCALE)
    ranked = (logits + 0.0).sort(descending=True, stable=True).indices[:num_top]
    ranked = ranked[logits[ranked] > -math.inf]
    columns = torch.cat((torch.tensor([chosen], device=ranked.device), ranked))
    pairs = list(zip(ids[columns].tolist(), (x[columns] - log_total).tolist(), strict=True))
    return TokenLogprobs(*pairs[0], tuple(pairs[1:]))
