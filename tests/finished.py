"""Finished requests for tests."""

from __future__ import annotations

from cluster.control.finished_request import FinishedRequest, FollowedPolicy, Outcome, RequestGuesses, RequestTimes
from cluster.messages.request import Drafter


def finished(
    number: int = 0,
    *,
    at: float = 1_000.0,
    tenant: str = "acme",
    variant: str = "default",
    outcome: Outcome = Outcome.LENGTH,
    tpot_s: float = 0.01,
    guesses: RequestGuesses | None = None,
) -> FinishedRequest:
    """One of 60 tokens that followed a variant; without guesses unless they are given."""
    times = RequestTimes(10 * tpot_s, tpot_s, 2 * tpot_s, 3 * tpot_s)
    return FinishedRequest(
        f"r{number}",
        at,
        "m",
        tenant,
        "chat",
        outcome,
        prompt_tokens=100,
        output_tokens=60,
        policy=FollowedPolicy(1, 1, variant),
        times=times,
        guesses=guesses or RequestGuesses(acceptance_length=1.0),
    )


def guessed(length: float, right: int, steps: int | None = None, *, fell_back: bool = False) -> RequestGuesses:
    """Of 60 tokens at that acceptance length: `right` of 100 first guesses, in `steps` (default: all) of its steps."""
    verified = round(60 / length) if steps is None else steps
    return RequestGuesses(
        Drafter.MODEL, "d1", fell_back, length, (verified, verified), (verified * right // 100, verified * right // 200)
    )
