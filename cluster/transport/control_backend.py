"""What the admin APIs need from whatever keeps documents: the control service, or a client of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from cluster.control.finished_request import FinishedRequest
from cluster.control.report import Report
from cluster.control.report_query import ReportQuery
from cluster.control.rollout import RolloutCommand
from cluster.control.rollout_entry import RolloutView
from cluster.control.store import AuditEntry, Change, Kind, Restore, Snapshot, VersionInfo
from cluster.control.switch import SpeculationSwitch

MAX_RECORDS: Final = 256  # finished requests in one report


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """A router's answer to a document. `error`: why it stays with the version before; empty if it does not."""

    kind: Kind
    version: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class RouterState:
    """What one connected router runs; version 0 is its configuration's defaults."""

    router_id: str
    policy_version: int = 0
    access_version: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class ControlStatus:
    """What is in force, who runs it, and why the store does not answer (empty if it does)."""

    policy_version: int
    access_version: int
    routers: tuple[RouterState, ...]
    store_error: str = ""


class RolloutBackend(Protocol):
    """Rollouts. Every method raises RequestError; UNAVAILABLE when the store is away."""

    async def start(self, text: str, author: str, reason: str) -> RolloutView:
        """INVALID names every flaw of the text; CONFLICT while another rollout of its rule is not finished."""
        ...

    async def get(self, rollout_id: str) -> RolloutView:
        """NOT_FOUND if there is none."""
        ...

    async def list(self, limit: int) -> tuple[RolloutView, ...]:
        """Those started last, newest first."""
        ...

    async def command(self, rollout_id: str, command: RolloutCommand, author: str, reason: str) -> RolloutView:
        """Do something to it by hand. CONFLICT if its phase does not allow that."""
        ...


class ControlBackend(Protocol):
    """Documents by kind and version. Every method raises RequestError; UNAVAILABLE when the store is away."""

    @property
    def rollouts(self) -> RolloutBackend:
        """Rollouts of the policy's rules."""
        ...

    async def get(self, kind: Kind, version: int | None = None) -> Snapshot:
        """One version, or the one in force; 0 is what holds before the first. NOT_FOUND if it is not kept."""
        ...

    async def apply(self, kind: Kind, change: Change, expected_version: int | None = None) -> Snapshot:
        """Put a document in force. INVALID names every flaw; CONFLICT if `expected_version` no longer stands."""
        ...

    async def roll_back(self, kind: Kind, restore: Restore) -> Snapshot:
        """Put an earlier version's text in force, as a new version; 0 is what holds before the first."""
        ...

    async def switch_speculation(self, switch: SpeculationSwitch, author: str, reason: str) -> Snapshot:
        """Make one change to the policy in force, whatever that is."""
        ...

    async def history(self, kind: Kind, limit: int, before: int | None = None) -> tuple[VersionInfo, ...]:
        """Newest first."""
        ...

    async def audit(self, limit: int, before: int | None = None) -> tuple[AuditEntry, ...]:
        """Who did what, newest first; `before` continues an earlier page."""
        ...

    async def status(self) -> ControlStatus: ...

    async def report(self, query: ReportQuery) -> Report:
        """What the finished requests of a window were like."""
        ...

    def watch(self, kind: Kind, after_version: int = 0) -> AsyncGenerator[Snapshot, None]:
        """The version in force if it is a later one, then every newer one that is seen; a slow reader skips some."""
        ...


class RouterDesk(Protocol):
    """Where routers are given documents."""

    def documents(self, router_id: str) -> AsyncGenerator[Snapshot, None]:
        """Every kind's version in force, then every newer one. The router counts as connected while this runs."""
        ...

    def acknowledge(self, router_id: str, acknowledgement: Acknowledgement) -> None:
        """Note what a connected router answered."""
        ...

    def now(self) -> float:
        """The service's time, in seconds since 1970."""
        ...

    def take_records(self, records: Sequence[FinishedRequest]) -> None:
        """Requests that have finished at a router, at most MAX_RECORDS; finished_at is on the service's clock."""
        ...
