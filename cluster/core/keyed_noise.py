"""Sampling noise as a pure function of (seed, position, token id): the reference that every implementation must match.

The generator is SplitMix64 read as a counter hash. Its i-th output (i = 0, 1, …) after seeding with s is

    output(s, i) = mix64(s + (i + 1) * GAMMA  mod 2**64)

Two levels of it give 64 bits of noise per token: the seed's stream, indexed by position, yields a row key, and the row
key's stream, indexed by token id, yields the token's bits:

    row_key(seed, position) = output(seed, position)
    bits(row_key, token_id) = output(row_key, token_id)

The highest 52 bits h become u = (h + 1/2) / 2**52, which lies inside (0, 1), is symmetric about 1/2 and is exact in a
double, so no clamping is needed. The noise is Gumbel: -ln(-ln u), in double precision. It lies between MIN_GUMBEL and
MAX_GUMBEL.

Nothing else enters: not the row of the batch, not the rank of the token, not the number of tokens in the vocabulary.
A draft model with the same seed therefore sees the same noise as its target, also when it scores only some of the
token ids. `position` is the token's absolute index in the sequence, prompt included.

Vectors for another implementation: tests/unit/test_keyed_noise.py.
Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014 (mix64 with Stafford's variant 13).
"""

from __future__ import annotations

import math

GAMMA = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
UNIFORM_BITS = 52  # one fewer than a double's mantissa: the half must still fit
CHOICES_POSITION = 2**32  # beyond any sequence's end

_MASK = 2**64 - 1


def mix64(value: int) -> int:
    """A bijection of 64-bit integers in which every input bit flips every output bit with probability 1/2."""
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & _MASK
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & _MASK
    return value ^ (value >> 31)


def output(seed: int, index: int) -> int:
    """The index-th output of SplitMix64 seeded with `seed`; both below 2**64."""
    return mix64((seed + (index + 1) * GAMMA) & _MASK)


def row_key(seed: int, position: int) -> int:
    """What all tokens at one position of one request share."""
    return output(seed, position)


def noise_bits(seed: int, position: int, token_id: int) -> int:
    """64 uniform bits."""
    return output(row_key(seed, position), token_id)


def choice_seed(seed: int, index: int) -> int:
    """The seed of the index-th output for one prompt: the first has the request's own.

    The others are noise of a position that no sequence reaches, so they are independent of all noise that is used.
    """
    return seed if index == 0 else noise_bits(seed, CHOICES_POSITION, index)


def uniform(bits: int) -> float:
    """The highest 52 of 64 bits as a number inside (0, 1)."""
    return ((bits >> (64 - UNIFORM_BITS)) + 0.5) * 2.0**-UNIFORM_BITS


def gumbel_of(bits: int) -> float:
    """Standard Gumbel noise from 64 uniform bits."""
    return -math.log(-math.log(uniform(bits)))


def gumbel(seed: int, position: int, token_id: int) -> float:
    """The noise that a token's log-probability gets at a position."""
    return gumbel_of(noise_bits(seed, position, token_id))


MIN_GUMBEL = gumbel_of(0)  # about -3.6
MAX_GUMBEL = gumbel_of(_MASK)  # about 36.7
