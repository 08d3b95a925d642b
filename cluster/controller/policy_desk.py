"""Changes of the policy in force, made on top of whatever stands."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cluster.control.control_store import ControlStore
from cluster.control.document import PolicyDocument, parse_document
from cluster.control.store import Change, ConflictError, Kind, Snapshot
from cluster.control.switch import as_text
from cluster.controller.audit_log import AuditLog
from cluster.controller.board import Board

MAX_TRIES = 5  # of a change to whatever stands, while others keep being first

Write = Callable[[Snapshot | None], Awaitable[Snapshot]]
Edit = Callable[[PolicyDocument], PolicyDocument | None]


class PolicyDesk:
    """Owns the writing of documents: routers are told of each one, and the audit log, before the write returns.

    `default_policy` is what the first change is made to. Methods raise StoreError, and what an edit raises.
    """

    def __init__(
        self, store: ControlStore, board: Board, default_policy: PolicyDocument, clock: Callable[[], float]
    ) -> None:
        self.default_policy = default_policy
        self._store = store
        self._board = board
        self._clock = clock
        self._audit = AuditLog(store, clock)

    def in_force(self) -> Snapshot | None:
        """The newest policy that this process knows of; None: none yet."""
        return self._board.latest(Kind.POLICY)

    async def standing(self) -> Snapshot | None:
        """The policy that the store has; None before the first."""
        return await self._store.current(Kind.POLICY)

    async def write(self, kind: Kind, action: str, write: Write, num_tries: int = MAX_TRIES) -> Snapshot:
        """Write on top of what stands, again if someone else is first. `action` is the audit log's word for it."""
        while True:
            num_tries -= 1
            standing = await self._store.current(kind)
            try:
                snapshot = await write(standing)
            except ConflictError:
                if num_tries == 0:
                    raise
            else:
                self._board.publish(snapshot)
                if snapshot is not standing:
                    await self._note(action, snapshot)
                return snapshot

    async def edit(self, action: str, edit: Edit, author: str, reason: str) -> Snapshot:
        """Change the policy that stands; an edit that gives None leaves it as it is."""

        async def write(standing: Snapshot | None) -> Snapshot:
            document = self.default_policy if standing is None else parse_document(standing.text)
            edited = edit(document)
            if edited is None and standing is not None:
                return standing
            change = Change(as_text(edited or document), author, reason)
            version = 0 if standing is None else standing.version
            return await self._store.put(Kind.POLICY, change, version, self._clock())

        return await self.write(Kind.POLICY, action, write)

    async def _note(self, action: str, snapshot: Snapshot) -> None:
        info = snapshot.info
        await self._audit.note(info.author, f"{info.kind}.{action}", info.kind, f"version {info.version}", info.reason)
