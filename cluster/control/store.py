"""What the control service keeps: versioned documents, the states of rollouts, and an audit log.

Pure: records, limits and the interface that a store fulfils. `ControlStore` is what callers use; it leaves to a
`StoreBackend` only what has to be atomic and durable. Texts are opaque here: whoever writes has parsed them.

Versions of a kind count 1, 2, 3, … without gaps and are never used twice. A write names the version that it was made
from (0: there is none yet) and is refused if that is no longer the current one. Times are Unix seconds, passed in.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

MAX_TEXT_BYTES = 256 * 1024  # of a document or of a rollout's state
MAX_NAME_CHARS = 128  # authors, rollout ids, actions
MAX_REASON_CHARS = 1024
MAX_DETAIL_CHARS = 4096
MAX_VERSION = 2**53 - 1  # also the largest integer that a JSON reader must keep exactly
MAX_PAGE = 100  # entries that one listing returns


class Kind(StrEnum):
    """What a versioned document is about; each kind counts its own versions."""

    POLICY = "policy"
    ACCESS = "access"


# --- errors ----------------------------------------------------------------------------------------------------------


class StoreError(Exception):
    """The store could not do what was asked."""


class InvalidWriteError(StoreError, ValueError):
    """A field of a write or of a query breaks a limit; the message names both."""


class ConflictError(StoreError):
    """Someone else wrote first. `current` is the version or revision that stands now."""

    def __init__(self, what: str, expected: int, current: int) -> None:
        super().__init__(f"{what} is at {current}, not at {expected}: read it again and repeat the change")
        self.expected = expected
        self.current = current


class MissingError(StoreError, LookupError):
    """There is no such version or rollout, or it is older than what is kept."""


class StoreFullError(StoreError):
    """There is no room for another unfinished rollout."""


class UnavailableError(StoreError):
    """The database does not answer. A write may or may not have been done; repeating it does it once."""


# --- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One line of a kind's history."""

    kind: Kind
    version: int
    digest: str  # SHA-256 of the text, in hex
    author: str
    reason: str
    written_at: float
    diff: str  # unified, against the version before
    restores: int | None = None  # the version that a rollback brought back


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A document as of one version."""

    info: VersionInfo
    text: str

    @property
    def version(self) -> int:
        return self.info.version


@dataclass(frozen=True, slots=True)
class Change:
    """A document that someone wants to put in force."""

    text: str
    author: str
    reason: str


@dataclass(frozen=True, slots=True)
class Restore:
    """An old version that someone wants back in force, as a new version."""

    version: int
    author: str
    reason: str


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """The durable state of one rollout. `state` is opaque text; a finished rollout may be forgotten to make room."""

    rollout_id: str
    revision: int
    state: str
    finished: bool
    updated_at: float


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Who did what to what, and how it ended. `sequence` is the store's; 0 before it is written."""

    actor: str
    action: str
    target: str
    outcome: str
    at: float
    detail: str = ""
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Retention:
    """How much is kept. What is current or unfinished is always kept."""

    versions: int = 500  # per kind
    rollouts: int = 200
    audit_entries: int = 10_000


class StoreBackend(Protocol):
    """What a database has to do, each call atomic and durable when it returns. All may raise UnavailableError.

    A write equal to the one that was done last counts as done: so it may be repeated when its answer was lost.
    """

    async def version(self, kind: Kind) -> int:
        """The current version; 0 if there is none."""

    async def snapshot(self, kind: Kind, version: int | None) -> Snapshot | None:
        """One version, or the current one."""

    async def history(self, kind: Kind, limit: int, before: int | None) -> tuple[VersionInfo, ...]:
        """Newest first, versions below `before` only."""

    async def append(self, snapshot: Snapshot, keep: int) -> None:
        """Write a snapshot and forget all but the newest `keep`.

        Raises ConflictError unless its version follows the current one.
        """

    async def rollout(self, rollout_id: str) -> RolloutRecord | None: ...

    async def rollouts(self, limit: int) -> tuple[RolloutRecord, ...]:
        """The ones started last, newest first."""

    async def unfinished_rollouts(self) -> tuple[RolloutRecord, ...]:
        """All of them, in the order in which they were started."""

    async def put_rollout(self, record: RolloutRecord, keep: int) -> None:
        """Write a record. A new one (revision 1) takes the place of the oldest finished one when there are `keep`.

        Raises ConflictError unless its revision follows the stored one, StoreFullError if `keep` are unfinished.
        """

    async def append_audit(self, entry: AuditEntry, keep: int) -> int:
        """Write an entry under the next sequence number, which is returned, and keep the newest `keep`."""

    async def audit(self, limit: int, before: int | None) -> tuple[AuditEntry, ...]:
        """Newest first, sequence numbers below `before` only."""

    async def close(self) -> None: ...


# --- checks ----------------------------------------------------------------------------------------------------------


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def check_text(field: str, text: str) -> None:
    """Raise InvalidWriteError unless the text can be stored: UTF-8, not empty, at most MAX_TEXT_BYTES."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidWriteError(f"{field}: not valid Unicode at character {error.start}") from error
    if not 0 < size <= MAX_TEXT_BYTES:
        raise InvalidWriteError(f"{field}: must have 1 to {MAX_TEXT_BYTES} bytes, has {size}")


def check_name(field: str, name: str, limit: int = MAX_NAME_CHARS) -> None:
    """Raise InvalidWriteError unless it is 1 to `limit` printable characters."""
    if not 0 < len(name) <= limit or not name.isprintable():
        raise InvalidWriteError(f"{field}: must be 1 to {limit} printable characters")


def check_remark(field: str, remark: str, limit: int = MAX_REASON_CHARS) -> None:
    """Raise InvalidWriteError unless it is at most `limit` characters, lines allowed."""
    if len(remark) > limit or not remark.replace("\n", "").replace("\t", "").isprintable():
        raise InvalidWriteError(f"{field}: must be at most {limit} printable characters")


def check_number(field: str, number: int, low: int, high: int = MAX_VERSION) -> None:
    if not low <= number <= high:
        raise InvalidWriteError(f"{field}: must be between {low} and {high}")


def check_page(limit: int, before: int | None = None) -> None:
    check_number("limit", limit, 1, MAX_PAGE)
    if before is not None:
        check_number("before", before, 1)
