"""Faults that an engine survives: counted, and told once per cause."""

from __future__ import annotations

import logging
import traceback
from collections import Counter

logger = logging.getLogger(__name__)


class FaultLog:
    """Owns the count of faults by cause: what was hit, the kind of exception, and the line that raised it."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._counts.total()

    def record(self, what: str, error: Exception | None = None) -> None:
        """Count a fault, and log it with its traceback if its cause is new. `what` says what it hit."""
        cause = what if error is None else f"{what}: {_cause_of(error)}"
        self._counts[cause] += 1
        if self._counts[cause] == 1:
            logger.error("%s; the same again is counted, not logged", cause, exc_info=error)


def _cause_of(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}"
