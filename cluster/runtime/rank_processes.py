"""Ranks as child processes of rank 0's, where no cluster places them."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from multiprocessing.process import BaseProcess

from cluster.runtime.ranks import RankJob, run_rank

_ORPHAN_POLL_S = 1.0


class RankProcesses:
    """Owns the processes of ranks 1 and up; they end with this process, however that ends."""

    def __init__(self, jobs: list[RankJob]) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = [
            context.Process(target=_run, args=(job, os.getpid()), name=f"rank-{job.rank}", daemon=True) for job in jobs
        ]
        for process in self._processes:
            process.start()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank from 1 on."""
        return [process.pid for process in self._processes if process.pid is not None]

    def failure(self) -> str | None:
        """See Ranks.failure."""
        for rank, process in enumerate(self._processes, start=1):
            if not process.is_alive():
                return f"rank {rank} of the tensor-parallel group has ended (exit code {process.exitcode})"
        return None

    def wait(self, timeout_s: float) -> None:
        """See Ranks.wait."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """See Ranks.kill."""
        for process in self._processes:
            process.kill()  # a stopped process does not hear anything less
        for process in self._processes:
            process.join()


def _run(job: RankJob, parent: int) -> None:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    run_rank(job)


def _end_with(parent: int) -> None:
    """End this process soon after its parent, also while it loads."""
    while os.getppid() == parent:
        threading.Event().wait(_ORPHAN_POLL_S)
    os._exit(1)
