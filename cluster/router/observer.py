"""What the router reports about itself, as plain values: whoever counts them (Prometheus, a test) implements one class.

All times are seconds on the router's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from cluster.control.finished_request import Outcome as Outcome  # re-exported: a value of an event below
from cluster.core.speculation import DropCause, FallbackCause
from cluster.messages.answer import GenerationStats
from cluster.messages.request import Drafter
from cluster.router.request_meter import MeterReading


class ResumeCause(StrEnum):
    """Why a request was moved to another target replica."""

    LOST = "target_lost"  # the stream to it ended
    REFUSED = "target_refused"
    DROPPED = "target_dropped"  # it gave the request up, as a draining replica does at its time limit
    SILENT = "target_silent"  # no commit for too long


@dataclass(frozen=True, slots=True)
class RequestLabels:
    """Who a request belongs to; metrics bound the number of tenants and workloads they tell apart."""

    model: str
    tenant: str
    workload: str


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """A request arrived, before admission."""

    request_id: str
    labels: RequestLabels
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TokensDelivered:
    """One delta became ready for the client.

    interval_s: since the previous delta; since arrival for the first one (that is TTFT).
    """

    request_id: str
    labels: RequestLabels
    num_tokens: int
    interval_s: float
    first: bool


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request ended, however it did; exactly one for each RequestStarted.

    ttft_s: arrival → first token, None without any. tpot_s: mean time per output token after the first, None below
    two tokens. admission_s: time in the router's own queue. drafter: the last one used (NONE: never speculated).
    draft_version: of the draft model that guessed last, or would have.
    """

    request_id: str
    labels: RequestLabels
    outcome: Outcome
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    admission_s: float
    drafter: Drafter
    stats: GenerationStats
    temperature: float = 1.0
    draft_version: str | None = None
    reading: MeterReading = field(default_factory=MeterReading)


@dataclass(frozen=True, slots=True)
class RoundFinished:
    """A draft block answered the commit it was asked for.

    round_trip_s: commit forwarded → block back at the router; draft_time_s: the part of it inside the draft replica.
    """

    labels: RequestLabels
    drafter: Drafter
    round_trip_s: float
    draft_time_s: float
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class ProposalForwarded:
    """Guesses have just been sent to a target."""

    labels: RequestLabels
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class BlockVerified:
    """A target step verified a draft block.

    round_trip_s: the commit that asked for the block → its arrival at the target, as the target saw it.
    draft_time_s: the part of it inside the draft replica. What is left is what router and transport added.
    """

    labels: RequestLabels
    drafter: Drafter
    round_trip_s: float
    draft_time_s: float
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True, slots=True)
class FellBack:
    """A request lost its drafter and goes on without it, or with another one."""

    labels: RequestLabels
    cause: FallbackCause


@dataclass(frozen=True, slots=True)
class HintDropped:
    """A frame that no longer applied, or never did, was dropped."""

    labels: RequestLabels
    cause: DropCause


@dataclass(frozen=True, slots=True)
class RequestResumed:
    """A request is being moved to another target replica."""

    labels: RequestLabels
    cause: ResumeCause


@dataclass(frozen=True, slots=True)
class PolicyApplied:
    """A policy has come into force."""

    version: int
    num_requests: int  # in flight, all of which follow it already


class RouterObserver(Protocol):
    """Counts what the router does. Called on the event loop, between frames: must be quick and never raise."""

    def request_started(self, event: RequestStarted) -> None: ...

    def tokens_delivered(self, event: TokensDelivered) -> None: ...

    def request_finished(self, event: RequestFinished) -> None: ...

    def round_finished(self, event: RoundFinished) -> None: ...

    def proposal_forwarded(self, event: ProposalForwarded) -> None: ...

    def block_verified(self, event: BlockVerified) -> None: ...

    def fell_back(self, event: FellBack) -> None: ...

    def hint_dropped(self, event: HintDropped) -> None: ...

    def request_resumed(self, event: RequestResumed) -> None: ...

    def policy_applied(self, event: PolicyApplied) -> None: ...


class NullObserver:
    """Counts nothing."""

    def request_started(self, event: RequestStarted) -> None:
        """Ignored."""

    def tokens_delivered(self, event: TokensDelivered) -> None:
        """Ignored."""

    def request_finished(self, event: RequestFinished) -> None:
        """Ignored."""

    def round_finished(self, event: RoundFinished) -> None:
        """Ignored."""

    def proposal_forwarded(self, event: ProposalForwarded) -> None:
        """Ignored."""

    def block_verified(self, event: BlockVerified) -> None:
        """Ignored."""

    def fell_back(self, event: FellBack) -> None:
        """Ignored."""

    def hint_dropped(self, event: HintDropped) -> None:
        """Ignored."""

    def request_resumed(self, event: RequestResumed) -> None:
        """Ignored."""

    def policy_applied(self, event: PolicyApplied) -> None:
        """Ignored."""
