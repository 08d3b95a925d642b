"""Where the newest version of each document hangs, and who waits for a newer one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

from cluster.control.store import Kind, Snapshot


class Board:
    """Owns the newest known snapshot of each kind. One event loop's."""

    def __init__(self) -> None:
        self._latest: dict[Kind, Snapshot] = {}
        self._changed = asyncio.Event()  # set, and replaced by a new one, at each change

    def latest(self, kind: Kind) -> Snapshot | None:
        """The newest known snapshot; None before the first."""
        return self._latest.get(kind)

    def version(self, kind: Kind) -> int:
        """The newest known version; 0 before the first."""
        snapshot = self._latest.get(kind)
        return 0 if snapshot is None else snapshot.version

    def publish(self, snapshot: Snapshot) -> None:
        """Hang up a snapshot, unless a newer one hangs there already."""
        if snapshot.version > self.version(snapshot.info.kind):
            self._latest[snapshot.info.kind] = snapshot
            self._changed.set()
            self._changed = asyncio.Event()

    async def follow(self, after: Mapping[Kind, int]) -> AsyncGenerator[Snapshot, None]:
        """The newest snapshot of each of the kinds in `after`, if it is later than that, then every later one.

        Who takes long sees the newest only.
        """
        seen = dict(after)
        while True:
            changed = self._changed
            for kind in seen:
                if self.version(kind) > seen[kind]:
                    snapshot = self._latest[kind]
                    seen[kind] = snapshot.version
                    yield snapshot
            await changed.wait()
