"""Rotary position embedding: the table of cosines and sines for a RopeSpec."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cluster.runtime.model_spec import RopeSpec, RopeType


def rotary_table(rope: RopeSpec, head_dim: int, num_positions: int) -> Tensor:
    """float32 [num_positions, head_dim]: cosines of the head_dim / 2 frequencies, then their sines.

    Computed in float32 as transformers does, so that far positions round the same way.
    """
    frequencies, scale = _frequencies(rope, head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1) * scale


def apply_rotary(heads: Tensor, table_rows: Tensor) -> None:
    """Rotate heads [num_tokens, num_heads, head_dim] in place; pairs are half a head apart.

    table_rows: the rotary table at each token's position, [num_tokens, head_dim].
    """
    cos, sin = table_rows[:, None].chunk(2, dim=-1)  # [num_tokens, 1, head_dim / 2]
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    heads.copy_(rotated)


def _frequencies(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position [head_dim / 2] and the factor on cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    match rope.rope_type:
        case RopeType.DEFAULT:
            return plain, 1.0
        case RopeType.LINEAR:
            return plain / rope.factor, 1.0
        case RopeType.LLAMA3:
            return _llama3(rope, plain), 1.0
        case RopeType.YARN:
            return _yarn(rope, plain, head_dim), _yarn_scale(rope)


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, those between blended."""
    turns = rope.original_max_position * plain / (2 * math.pi)  # over the original context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn(rope: RopeSpec, plain: Tensor, head_dim: int) -> Tensor:
    """Like llama3, but the blend is linear in the frequency's index (YaRN, arXiv 2309.00071)."""

    def index_of(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001  # one step, not a division by zero
    interpolate = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / rope.factor * interpolate + plain * (1 - interpolate)


def _yarn_scale(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
