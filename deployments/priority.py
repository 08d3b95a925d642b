"""Who computes first where routers, pools and Ray itself share a machine's cores.

A kernel waits for all of its threads, so a pool that loses one for a millisecond loses all of them. What a router or
Ray does for a token fits between two steps, when a pool leaves cores idle.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

import psutil

_NICENESS: Final = 15
_BESIDE_REPLICAS: Final = (
    "ray::ServeController", "ray::ProxyActor", "ray::HAProxyManager", "ray::DashboardAgent", "ray::RuntimeEnvAgent",
    "bin/haproxy", "/gcs_server", "ray/autoscaler/", "ray/dashboard/", "ray/_private/log_monitor",
)  # fmt: skip


def yield_to_pools() -> None:
    """Put this process's threads, and those that they will start, after a pool's."""
    _yield(psutil.Process())


def let_ray_yield_to_pools() -> None:
    """Put what Ray runs beside replicas, in a cluster that this process started, after a pool's.

    Not the raylet: replicas that it starts later begin with its priority, and cannot raise it.
    """
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            title = " ".join((process.name(), *process.cmdline()[:3]))
            if any(part in title for part in _BESIDE_REPLICAS):
                _yield(process)


def _yield(process: psutil.Process) -> None:
    # On Linux each thread has a niceness of its own.
    thread_ids = [thread.id for thread in process.threads()] if psutil.LINUX else [process.pid]
    for thread_id in thread_ids:
        with suppress(OSError):  # it has ended, or is behind already
            os.setpriority(os.PRIO_PROCESS, thread_id, _NICENESS)
