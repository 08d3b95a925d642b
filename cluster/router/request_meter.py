"""What is measured of one request while it runs, in a memory that does not grow with its output."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.control.finished_request import FollowedPolicy
from cluster.control.log_histogram import LogHistogram
from cluster.messages.answer import PolicyStamp
from cluster.messages.rounds import Commit


@dataclass(frozen=True, slots=True)
class MeterReading:
    """Quantiles of the times between a request's deltas, guesses verified and accepted by their position in a block,
    and what it followed."""

    itl_p95_s: float | None = None
    itl_p99_s: float | None = None
    verified_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    policy: FollowedPolicy | None = None


class RequestMeter:
    """Owns one request's measurements."""

    def __init__(self) -> None:
        self._intervals = LogHistogram()
        self._verified: list[int] = []
        self._accepted: list[int] = []
        self._policy: FollowedPolicy | None = None

    def note_interval(self, interval_s: float) -> None:
        """A delta came so long after the one before."""
        self._intervals.add(interval_s)

    def note_step(self, commit: Commit) -> None:
        """A target step has verified guesses, or none."""
        missing = commit.num_draft_tokens - len(self._verified)
        if missing > 0:
            self._verified += [0] * missing
            self._accepted += [0] * missing
        for position in range(commit.num_draft_tokens):
            self._verified[position] += 1
        for position in range(commit.num_accepted_tokens):
            self._accepted[position] += 1

    def follow(self, stamp: PolicyStamp) -> None:
        """A decision holds from now on."""
        before = self._policy
        since = stamp.version if before is None else before.since_version
        is_mixed = before is not None and (
            before.is_mixed or (before.rule, before.variant) != (stamp.rule, stamp.variant)
        )
        self._policy = FollowedPolicy(stamp.version, since, stamp.variant, stamp.rule, is_mixed)

    def read(self) -> MeterReading:
        """All of it, so far."""
        return MeterReading(
            self._intervals.quantile(0.95),
            self._intervals.quantile(0.99),
            tuple(self._verified),
            tuple(self._accepted),
            self._policy,
        )
