"""How many threads a process computes with, and how its OpenMP threads behave while idle.

Two pools of threads live in a process: the kernel team (cluster.runtime.kernels.team), which does nearly all the
work on a CPU, and torch's OpenMP pool, which serves the large products of prefill. Both are sized here, since the
environment that a process starts in often says something else (Ray sets OMP_NUM_THREADS=1 for fractional CPUs).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, MutableMapping
from functools import cache
from types import MappingProxyType

from cluster.runtime.kernels.team import KernelTeam

# An idle OpenMP thread spins for this many rounds (some 20 microseconds) before it sleeps; libgomp by itself spins
# for milliseconds, on a core that another pool's process needs.
OPENMP_ENVIRONMENT: Mapping[str, str] = MappingProxyType({"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"})


def default_num_threads() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_openmp_environment(environment: MutableMapping[str, str] | None = None) -> None:
    """Fill in what is not set yet of OPENMP_ENVIRONMENT; counts only if torch has not been imported in the process."""
    target = os.environ if environment is None else environment
    for name, value in OPENMP_ENVIRONMENT.items():
        target.setdefault(name, value)


class _ProcessTeams:
    """Owns the process's kernel teams: the last is in use, earlier ones are closed.

    Closed ones are kept, since a launch in another thread may still be reading their few hundred bytes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._teams = [KernelTeam(default_num_threads())]

    @property
    def current(self) -> KernelTeam:
        return self._teams[-1]

    def resize(self, num_threads: int) -> None:
        with self._lock:
            previous = self.current
            if previous.num_threads != num_threads:
                self._teams.append(KernelTeam(num_threads))
                previous.close()


@cache
def _process_teams() -> _ProcessTeams:
    return _ProcessTeams()


def kernel_team() -> KernelTeam:
    """The process's team of kernel threads; all cores unless set_num_threads said otherwise."""
    return _process_teams().current


def set_num_threads(num_threads: int | None) -> None:
    """Size the kernel team and torch's pool; None means all cores. Raises ValueError for less than one."""
    import torch  # late, so that set_openmp_environment can come first

    count = default_num_threads() if num_threads is None else num_threads
    _process_teams().resize(count)
    torch.set_num_threads(count)
