"""Watches how promptly one draft session answers, and says when to stop asking it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """How much a request bears from a draft before it gives it up. A target never waits this long: holds have a bound.

    max_missed_rounds: rounds in a row that brought no guess in time. max_silence_s: since the first unanswered
    question. max_open_s: the same before a session's first answer, while it may still be ingesting a long prompt.
    """

    max_missed_rounds: int = 64
    max_silence_s: float = 2.0
    max_open_s: float = 10.0


class DraftWatch:
    """Owns the open question to one draft session: which committed length it was asked at, and since when."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._asked_len: int | None = None
        self._asked_at = 0.0
        self._silent_since: float | None = None
        self._num_missed = 0
        self._has_answered = False

    @property
    def asked_len(self) -> int | None:
        """The committed length that a block is awaited for; None: nothing is awaited."""
        return self._asked_len

    @property
    def asked_at(self) -> float:
        """When the awaited block was asked for."""
        return self._asked_at

    def ask(self, committed_len: int, now: float) -> None:
        """A commit went out and wants guesses."""
        self._asked_len, self._asked_at = committed_len, now
        if self._silent_since is None:
            self._silent_since = now

    def pass_by(self) -> None:
        """The target went on: what was asked for, if anything, is missed."""
        if self._asked_len is not None:
            self._num_missed += 1
            self._asked_len = None

    def rest(self) -> None:
        """The target wants no guesses for now: silence says nothing."""
        self._silent_since = None

    def hear(self) -> None:
        """A block of this session came, useful or not."""
        self._silent_since = None
        self._has_answered = True

    def answer(self) -> None:
        """The awaited block came in time."""
        self._asked_len = None
        self.help_late()

    def help_late(self) -> None:
        """A late block was still of use."""
        self._num_missed = 0

    def has_lost_patience(self, now: float) -> bool:
        """True when asking on is pointless."""
        silence_s = 0.0 if self._silent_since is None else now - self._silent_since
        if not self._has_answered:
            return silence_s >= self._patience.max_open_s
        return silence_s >= self._patience.max_silence_s or self._num_missed >= self._patience.max_missed_rounds
