"""What routers report to control of each finished request: what rollouts compare, and reports break down. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.control.cohort import Cohort, RequestRecord
from cluster.control.document import CONTROL
from cluster.messages.request import Drafter


class Outcome(StrEnum):
    """How a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"  # the client went away
    DEADLINE = "deadline"
    INVALID = "invalid"  # refused: the request can never be served
    OVERLOADED = "overloaded"  # refused: try later
    UNAVAILABLE = "unavailable"
    ERROR = "error"


FAILURES = frozenset({Outcome.DEADLINE, Outcome.UNAVAILABLE, Outcome.ERROR})  # what the system is to blame for


@dataclass(frozen=True, slots=True)
class FollowedPolicy:
    """The part of the policy that a request followed last.

    since_version: of the policy under which it began. is_mixed: it followed another rule or variant before, so its
    figures say nothing about this one.
    """

    version: int
    since_version: int
    variant: str
    rule: str | None = None
    is_mixed: bool = False


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """In seconds; None where a request has no such value. The ITLs are quantiles of the request's own intervals."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_p95_s: float | None = None
    itl_p99_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestGuesses:
    """What came of a request's guesses. Position 0 is the first guess of a block, and each has MAX_DRAFT_TOKENS.

    drafter: the last one used (NONE: never speculated); version: of its draft model. acceptance_length: tokens emitted
    per target step, bonus included; None before the first step.
    """

    drafter: Drafter = Drafter.NONE
    draft_version: str | None = None
    fell_back: bool = False  # speculation was wanted and given up at least once
    acceptance_length: float | None = None
    verified_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()

    @property
    def num_verified(self) -> int:
        return sum(self.verified_per_position)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_per_position)


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One finished request. Nothing of its text, its user or its session.

    finished_at: at control in seconds since 1970, in a router on its own clock. policy: None if it ended before any
    decision.
    """

    request_id: str
    finished_at: float
    model: str
    tenant: str
    workload: str
    outcome: Outcome
    temperature: float = 1.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    policy: FollowedPolicy | None = None
    times: RequestTimes = field(default_factory=RequestTimes)
    guesses: RequestGuesses = field(default_factory=RequestGuesses)


def cohort_record(request: FinishedRequest, rule: str, since_version: int) -> RequestRecord | None:
    """What the request says about a rule's percentage that is in force since a version of the policy.

    None if it says nothing: it followed another rule, or began earlier, or moved between the cohorts.
    """
    policy = request.policy
    if policy is None or policy.rule != rule or policy.is_mixed or policy.since_version < since_version:
        return None
    times, guesses = request.times, request.guesses
    return RequestRecord(
        request.request_id,
        Cohort.CONTROL if policy.variant == CONTROL else Cohort.CANARY,
        request.finished_at,
        request.outcome in FAILURES,
        guesses.fell_back,
        times.ttft_s,
        times.tpot_s,
        times.itl_p95_s,
        times.itl_p99_s,
        guesses.acceptance_length,
    )
