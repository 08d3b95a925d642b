"""Which draft tokens survive verification: exact, readable references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class AcceptResult(NamedTuple):
    """What one verification emits: the accepted draft tokens, then the target's own next token."""

    emitted: tuple[int, ...]  # num_accepted + 1 tokens
    num_accepted: int


def accept_equal(draft_token_ids: Sequence[int], sampled_token_ids: Sequence[int]) -> AcceptResult:
    """Accept draft tokens while they equal what the target sampled itself at the same position.

    For K draft tokens the target has sampled K + 1: the j-th is its token at the j-th draft token's position, given
    the draft tokens before it. Samples past the first unequal one were conditioned on a wrong token and are dropped.
    Emits between 1 and K + 1 tokens. Raises ValueError when the lengths do not fit.
    """
    if len(sampled_token_ids) != len(draft_token_ids) + 1:
        raise ValueError(f"{len(draft_token_ids)} draft tokens need one more sample, got {len(sampled_token_ids)}")
    num_accepted = common_prefix_len(draft_token_ids, sampled_token_ids)
    return AcceptResult(tuple(sampled_token_ids[: num_accepted + 1]), num_accepted)


def common_prefix_len(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading elements are equal."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
