"""Who computes first where a router and pools share a machine's cores."""

from __future__ import annotations

import os
from contextlib import suppress

_NICENESS = 15
_THREADS = "/proc/self/task"


def yield_to_pools() -> None:
    """Put this process's threads, and those that they will start, after a pool's.

    A kernel waits for all of its threads, so a pool that loses one for a millisecond loses all of them. What a router
    does for a token fits between two steps, when a pool leaves cores idle.
    """
    threads = os.listdir(_THREADS) if os.path.isdir(_THREADS) else ["0"]  # on Linux each thread has its own niceness
    for thread in threads:
        with suppress(OSError):  # it has ended, or is behind already
            os.setpriority(os.PRIO_PROCESS, int(thread), _NICENESS)
