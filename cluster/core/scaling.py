"""How many replicas a pool wants, from what its replicas say of themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cluster.core.step import SchedulerStats

FULL_OCCUPANCY: Final = 0.75  # of a replica's places; above it bursts begin to wait
FULL_KV: Final = 0.85  # of a replica's blocks; above it preemptions begin
MOST_LATE: Final = 0.25  # of the blocks that targets await
SHARED_FROM: Final = 4.0  # sessions per draft replica, from which lateness is the others' fault and not the draft's own
TOLERANCE: Final = 0.1
MOST_AT_ONCE: Final = 2.0  # times as many replicas by one decision

_LATE: Final = ("expired", "not_worth")
_IN_TIME: Final = ("arrived",)


@dataclass(frozen=True, slots=True)
class PoolSignals:
    """Means over a pool's replicas.

    occupancy: sequences or sessions over max_num_seqs; above 1, some wait. kv_usage: used share of KV blocks.
    late_blocks: share of the blocks that a target awaited which came too late to be worth waiting for; 0 in drafts.
    """

    occupancy: float
    kv_usage: float
    num_sequences: float
    late_blocks: float = 0.0


class LoadMeter:
    """Owns what one replica has already reported of its counters."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._seen: Mapping[str, int] = {}

    def read(self, stats: SchedulerStats) -> PoolSignals:
        """The replica's own signals; those from counters are of the time since the last reading."""
        num_sequences = stats.num_running + stats.num_waiting
        late, in_time = self._new(stats.holds, _LATE), self._new(stats.holds, _IN_TIME)
        self._seen = dict(stats.holds)
        return PoolSignals(
            occupancy=num_sequences / self._max_num_seqs,
            kv_usage=stats.num_used_blocks / stats.num_total_blocks,
            num_sequences=num_sequences,
            late_blocks=late / (late + in_time) if late + in_time else 0.0,
        )

    def _new(self, holds: Mapping[str, int], outcomes: tuple[str, ...]) -> int:
        return sum(holds.get(outcome, 0) - self._seen.get(outcome, 0) for outcome in outcomes)


def target_replicas(current: int, signals: PoolSignals) -> int:
    """For a target pool: by its own places and KV."""
    return _replicas(current, _fullness(signals))


def draft_replicas(current: int, signals: PoolSignals, late_blocks: float) -> int:
    """For a draft pool: by its own places and KV, and by how many blocks come too late for the targets.

    A replica that few sessions share is late because its model is slow, which no further replica helps.
    """
    lateness = late_blocks / MOST_LATE if signals.num_sequences >= SHARED_FROM else 0.0
    return _replicas(current, max(_fullness(signals), lateness))


def _fullness(signals: PoolSignals) -> float:
    """How full the fuller of the two is; 1: as full as a replica should be."""
    return max(signals.occupancy / FULL_OCCUPANCY, signals.kv_usage / FULL_KV)


def _replicas(current: int, fullness: float) -> int:
    if abs(fullness - 1) <= TOLERANCE:
        return current
    return max(1, math.ceil(current * min(fullness, MOST_AT_ONCE)))
