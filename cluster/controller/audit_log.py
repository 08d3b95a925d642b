"""Who did what, for whoever asks later."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cluster.control.control_store import ControlStore
from cluster.control.store import MAX_DETAIL_CHARS, AuditEntry, StoreError

logger = logging.getLogger(__name__)


class AuditLog:
    """Owns the writing of the store's audit log. What has been done is done, whether or not it can be written there."""

    def __init__(self, store: ControlStore, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock

    async def note(self, actor: str, action: str, target: str, outcome: str, detail: str = "") -> None:
        """Write down what has been done; a store that is away is a line in this process's log instead."""
        try:
            await self._store.append_audit(
                AuditEntry(actor, action, target, outcome, self._clock(), detail[:MAX_DETAIL_CHARS])
            )
        except StoreError as error:
            logger.warning("%s of %s by %s is not in the audit log: %s", action, target, actor, error)
