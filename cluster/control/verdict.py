"""Why speculation does not pay for some requests, in words; or that it does. Pure.

A step that verifies guesses takes longer than a plain one, so it must emit more tokens. Its time is TPOT · acceptance
length, and a plain step's is the TPOT of requests without guesses; the ratio of the two is the acceptance length that
breaks even. Both are medians over requests of one model in the same window, so load and machine are the same for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cluster.control.cell import Cell

MIN_REQUESTS: Final = 5  # on either side, before anything is said
_IN_VAIN: Final = 1.1  # tokens per step: hardly more than plain decoding emits
_FEW_STEPS: Final = 0.5  # of a request's steps have guesses
_OFTEN_WRONG: Final = 0.5  # of first guesses are accepted
_OFTEN_LOST: Final = 0.05  # of requests fell back


def break_even(speculating: Cell, plain: Cell) -> float | None:
    """The acceptance length from which on speculation pays; None if either side shows too little."""
    if min(speculating.tpot.total, plain.tpot.total) < MIN_REQUESTS:
        return None
    length, with_guesses, without = (
        speculating.acceptance_length,
        speculating.tpot.quantile(0.5),
        plain.tpot.quantile(0.5),
    )
    if not (length and with_guesses and without):
        return None
    return length * with_guesses / without


def why_not(speculating: Cell, plain: Cell | None) -> str | None:
    """Why speculation does not pay for these requests; None if it does, or too little is known."""
    length = speculating.acceptance_length
    if length is None or speculating.requests < MIN_REQUESTS:
        return None
    needed = None if plain is None else break_even(speculating, plain)
    if needed is None:
        if length >= _IN_VAIN:
            return None
        found = f"acceptance length {length:.2f}: guesses hardly ever save a step (no plain requests to compare with)"
    elif length < needed:
        found = f"acceptance length {length:.2f} is below the break-even of {needed:.2f}"
    else:
        return None
    return "; ".join((found, *_causes(speculating)))


def _causes(cell: Cell) -> Iterator[str]:
    if cell.num_verifications:
        right = cell.accepted[0] / cell.num_verifications
        if right < _OFTEN_WRONG:
            yield f"only {right:.0%} of first guesses are right"
    if cell.num_verifications < _FEW_STEPS * cell.num_steps:
        share = cell.num_verifications / cell.num_steps
        yield f"only {share:.0%} of steps had guesses: drafts come late, or are not asked for"
    if cell.fell_back > _OFTEN_LOST * cell.requests:
        yield f"{cell.fell_back / cell.requests:.0%} of requests lost their drafter"
