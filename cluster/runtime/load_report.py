"""When a replica tells its routers how full it is."""

from __future__ import annotations

from cluster.core.step import SchedulerStats
from cluster.messages.rounds import PoolLoad

REPORT_INTERVAL_S = 0.2


def load_of(stats: SchedulerStats, is_draining: bool) -> PoolLoad:
    """What routers need to know of a scheduler's occupancy."""
    return PoolLoad(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_free_blocks=stats.num_free_blocks,
        num_total_blocks=stats.num_total_blocks,
        peak_used_blocks=stats.peak_used_blocks,
        draining=is_draining,
    )


class LoadReporter:
    """Owns the last load reported: a change is told at once, the next one no sooner than an interval later."""

    def __init__(self) -> None:
        self._last: PoolLoad | None = None
        self._last_at = 0.0
        self.due_at: float | None = None  # when a change that was held back may be told

    def poll(self, load: PoolLoad, now: float) -> PoolLoad | None:
        """The load if it is to be reported now."""
        if load == self._last:
            self.due_at = None
            return None
        may_tell_at = self._last_at + REPORT_INTERVAL_S
        if self._last is not None and now < may_tell_at and load.draining == self._last.draining:
            self.due_at = may_tell_at
            return None
        self._last, self._last_at, self.due_at = load, now, None
        return load
