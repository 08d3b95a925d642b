"""The open draft sessions of one replica, and who gives way when its KV runs short."""

from __future__ import annotations

from collections.abc import Container, Iterator

from cluster.core.draft_session import DraftSession
from cluster.core.kv_cache import KVCacheManager
from cluster.core.prefix_sharing import PrefixSharing
from cluster.messages.rounds import Refusal, RefusalReason


class DraftSessions:
    """Owns every open session and the KV blocks it holds.

    Room is made by closing the session that has been without work the longest, if that is `idle_after_s` or longer,
    then the one opened last. So the oldest always get on, and whoever is closed decodes plainly or is drafted for
    elsewhere.
    """

    def __init__(self, kv: KVCacheManager, max_sessions: int, idle_after_s: float) -> None:
        self.kv = kv
        self.prefixes = PrefixSharing(kv)
        self.num_evicted = 0
        self._max_sessions = max_sessions
        self._idle_after_s = idle_after_s
        self._sessions: dict[str, DraftSession] = {}  # opened first, first
        self._refusals: list[Refusal] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[DraftSession]:
        return iter(self._sessions.values())

    def get(self, request_id: str) -> DraftSession | None:
        return self._sessions.get(request_id)

    def take_refusals(self) -> list[Refusal]:
        """Sessions that had to be closed since the last call."""
        refusals, self._refusals = self._refusals, []
        return refusals

    def admit(self, session: DraftSession, now: float) -> str | None:
        """Take a session in, with KV for the tokens that it has; else say what is short. Only idle ones give way."""
        if len(self._sessions) >= self._max_sessions and not self._evict_idle(now):
            return f"{self._max_sessions} draft sessions are open"
        while not self.prefixes.admit(session):
            if not self._evict_idle(now):
                return "no KV blocks are free"
        self._sessions[session.request_id] = session
        return None

    def make_room(self, session: DraftSession, num_tokens: int, busy: Container[str], now: float) -> bool:
        """Get KV for `num_tokens` tokens of a session; False if it was itself closed. `busy` ones never give way."""
        if session.request_id not in self._sessions:
            return False  # gave way to an older one a moment ago
        while not self.kv.allocate_slots(session.request_id, num_tokens):
            if self._evict_idle(now):
                continue
            newest = next(known for key, known in reversed(self._sessions.items()) if key not in busy)
            self._evict(newest)
            if newest is session:
                return False
        return True

    def close(self, request_id: str) -> None:
        """Forget a session and free its KV; unknown ids are ignored."""
        if self._sessions.pop(request_id, None) is not None:
            self.kv.free(request_id)

    def refuse(self, session: DraftSession, reason: RefusalReason, message: str) -> None:
        """Close a session and tell its router why."""
        self.close(session.request_id)
        self._refusals.append(Refusal(session.request_id, reason, message, session.epoch))

    def _evict_idle(self, now: float) -> bool:
        since = now - self._idle_after_s
        idle = [known for known in self if known.last_used <= since and not known.num_pending_tokens]
        if not idle:
            return False
        self._evict(min(idle, key=lambda known: known.last_used))
        return True

    def _evict(self, session: DraftSession) -> None:
        self.num_evicted += 1
        self.refuse(session, RefusalReason.QUEUE_FULL, "closed for want of KV blocks")
