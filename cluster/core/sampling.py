"""How a row of logits becomes a token: the exact definition, in plain Python. cluster.runtime has the fast twins.

First `adjusted`, for parameters that change logits: repetition_penalty, then frequency_penalty, presence_penalty and
logit_bias, then min_tokens.

    seen(v)    whether v is in the prompt or in the output so far
    count(v)   how often it is in the output so far
    scaled     logit / repetition_penalty if seen and logit > 0, logit * repetition_penalty if seen, else logit
    logit'(v) = float32(scaled + (bias(v) - (frequency_penalty * count(v) + presence_penalty * [count(v) > 0])))
    logit'(v) = -inf instead, while the output is shorter than min_tokens, if v would end it

All of that in double precision, each operation rounded. "So far" is every token before the position that is sampled:
in a window, the draft tokens before it count as if they had been emitted.

Then `masked`, for a grammar: -inf for each token that it does not allow there, so nothing before can lift one.

Then `sample`. Order of application: temperature → min_p → top_k → top_p → argmax of scaled logit + keyed noise.

    x(v) = (logit(v) - largest logit) * (1 / temperature), in double precision, ≤ 0
    min_p   keeps v with x(v) ≥ ln(min_p), that is probability ≥ min_p × the largest one
    top_k   keeps the k most likely of those
    top_p   keeps the shortest prefix of those, most likely first, whose weight reaches top_p × their total weight
    token   argmax over what is kept of x(v) + gumbel(seed, position, v)

Everywhere, equals are ordered by token id, lowest first. A logit of -inf is a token that cannot be chosen.

Weights are probabilities up to a factor, rounded to integers: weight(v) = round(e**x(v) * 2**34). Integers add up to
the same sum in any order, on any device, however the row is split, so the cut is the same too.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from cluster.core.grammar import TokenMask
from cluster.core.keyed_noise import gumbel_of, output, row_key
from cluster.messages.answer import TokenLogprobs
from cluster.messages.request import SamplingParams

WEIGHT_SCALE = 2.0**34
GREEDY_BELOW = 1e-6  # noise at a lower temperature would only decide between logits that float32 hardly tells apart


def is_greedy(params: SamplingParams) -> bool:
    """Whether the token is the most likely one, whatever the seed."""
    return params.temperature < GREEDY_BELOW


class RowFault(StrEnum):
    """Why no token can be sampled from a row of logits."""

    NAN = "a logit is NaN"
    INFINITE = "a logit is +inf"
    EMPTY = "every logit is -inf"


class InvalidLogits(ValueError):
    """A row of logits from which no token can be sampled."""

    def __init__(self, fault: RowFault) -> None:
        super().__init__(f"cannot sample: {fault}")
        self.fault = fault


@dataclass(frozen=True, slots=True)
class _Token:
    token_id: int
    logit: float
    x: float  # scaled distance from the top, ≤ 0
    weight: int


def adjusted(
    logits: Sequence[float],
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    stop_token_ids: Set[int] = frozenset(),
    token_ids: Sequence[int] | None = None,
) -> list[float]:
    """The logits that `sample` is to be given, after penalties, logit_bias and min_tokens.

    logits: float32 values. output_token_ids: all tokens between the prompt and the position that is sampled.
    stop_token_ids: those that end the output. token_ids: as for `sample`.
    """
    counts, bias = Counter(output_token_ids), dict(params.logit_bias)
    seen = counts.keys() | set(prompt_token_ids)
    suppressed = stop_token_ids if len(output_token_ids) < params.min_tokens else frozenset()

    def adjust(logit: float, token_id: int) -> float:
        if token_id in seen:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        count = counts[token_id]
        penalty = params.frequency_penalty * count + params.presence_penalty * (count > 0)
        shift = -math.inf if token_id in suppressed else bias.get(token_id, 0.0) - penalty
        return float32(logit + shift)

    ids = range(len(logits)) if token_ids is None else token_ids
    return [adjust(logit, token_id) for logit, token_id in zip(logits, ids, strict=True)]


def masked(logits: Sequence[float], mask: TokenMask, token_ids: Sequence[int] | None = None) -> list[float]:
    """The logits that `sample` is to be given in a grammar. token_ids: as for `sample`."""
    ids = range(len(logits)) if token_ids is None else token_ids
    return [logit if mask.allows(token_id) else -math.inf for logit, token_id in zip(logits, ids, strict=True)]


def float32(value: float) -> float:
    """The nearest single-precision number; beyond the largest, an infinity."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


def sample(
    logits: Sequence[float], params: SamplingParams, position: int, token_ids: Sequence[int] | None = None
) -> int:
    """The token id at `position`. `token_ids[i]` is what logits[i] scores; None: i itself.

    Raises InvalidLogits when the row holds NaN or +inf, or nothing but -inf.
    """
    ids = range(len(logits)) if token_ids is None else token_ids
    if is_greedy(params):
        return _ranked(logits, ids, 1.0)[0].token_id
    kept = filter_tokens(_ranked(logits, ids, params.temperature), params)
    key = row_key(params.seed, position)
    return max(kept, key=lambda t: (t.x + gumbel_of(output(key, t.token_id)), -t.token_id)).token_id


def kept_weights(
    logits: Sequence[float], params: SamplingParams, token_ids: Sequence[int] | None = None
) -> dict[int, float]:
    """The distribution that `sample` draws from at temperature > 0, up to a factor: token id → e**x, unrounded."""
    ids = range(len(logits)) if token_ids is None else token_ids
    return {t.token_id: math.exp(t.x) for t in filter_tokens(_ranked(logits, ids, params.temperature), params)}


def filter_tokens(ranked: Sequence[_Token], params: SamplingParams) -> Sequence[_Token]:
    """The tokens that min_p, then top_k, then top_p leave, of tokens ranked from the most likely on."""
    if params.min_p > 0:
        floor = math.log(params.min_p)
        ranked = [token for token in ranked if token.x >= floor]
    if params.top_k is not None:
        ranked = ranked[: params.top_k]
    return ranked if params.top_p >= 1 else _nucleus(ranked, params.top_p)


def logprobs(
    logits: Sequence[float], token_id: int, num_top: int, token_ids: Sequence[int] | None = None
) -> TokenLogprobs:
    """Natural-log probabilities in the unfiltered temperature-1 distribution: of one token, and the num_top largest."""
    ids = range(len(logits)) if token_ids is None else token_ids
    ranked = _ranked(logits, ids, 1.0)
    log_total = math.log(sum(token.weight for token in ranked) / WEIGHT_SCALE)
    by_id = {token.token_id: token.x - log_total for token in ranked}
    top = tuple((token.token_id, by_id[token.token_id]) for token in ranked[:num_top])
    return TokenLogprobs(token_id, by_id[token_id], top)


def _ranked(logits: Sequence[float], ids: Sequence[int], temperature: float) -> list[_Token]:
    """Every possible token, the most likely first, lowest id first among equals."""
    largest = _largest(logits)
    scale = 1.0 / temperature
    possible = [(logit, i) for logit, i in zip(logits, ids, strict=True) if logit > -math.inf]
    possible.sort(key=lambda item: (-item[0], item[1]))
    return [_token(i, logit, (logit - largest) * scale) for logit, i in possible]


def _token(token_id: int, logit: float, x: float) -> _Token:
    return _Token(token_id, logit, x, round(math.exp(x) * WEIGHT_SCALE))


def _largest(logits: Sequence[float]) -> float:
    if any(math.isnan(logit) for logit in logits):
        raise InvalidLogits(RowFault.NAN)
    largest = max(logits, default=-math.inf)
    if largest == -math.inf:
        raise InvalidLogits(RowFault.EMPTY)
    if largest == math.inf:
        raise InvalidLogits(RowFault.INFINITE)
    return largest


def _nucleus(ranked: Sequence[_Token], top_p: float) -> Sequence[_Token]:
    needed = top_p * sum(token.weight for token in ranked)
    reached = 0
    for count, token in enumerate(ranked, start=1):
        reached += token.weight
        if reached >= needed:
            return ranked[:count]
    raise AssertionError("the whole always reaches a fraction of itself")
