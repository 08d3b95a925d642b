"""Ranks as Ray actors in the placement group of the replica that they belong to."""

from __future__ import annotations

import os
import signal
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import PoolConfig
from cluster.runtime.ranks import RankJob, run_rank
from cluster.runtime.threads import OPENMP_ENVIRONMENT

_START_TIMEOUT_S = 120.0


class RankActor:
    """One rank other than 0. It ends with the replica that made it, as every actor ends with its owner."""

    def pid(self) -> int:
        return os.getpid()

    def run(self, job: RankJob) -> None:
        """See run_rank."""
        run_rank(job)


class RankActors:
    """Owns the actors of ranks 1 and up, in bundles 1 and up of this replica's placement group."""

    def __init__(self, jobs: list[RankJob]) -> None:
        self._actors = [_actor(job.pool, job.rank) for job in jobs]
        self._pids: list[int] = ray.get([actor.pid.remote() for actor in self._actors], timeout=_START_TIMEOUT_S)
        self._runs = [actor.run.remote(job) for actor, job in zip(self._actors, jobs, strict=True)]

    def failure(self) -> str | None:
        """See Ranks.failure."""
        ended, _ = ray.wait(self._runs, timeout=0)
        return _why(self._runs.index(ended[0]) + 1, ended[0]) if ended else None

    def wait(self, timeout_s: float) -> None:
        """See Ranks.wait."""
        ray.wait(self._runs, num_returns=len(self._runs), timeout=timeout_s)

    def kill(self) -> None:
        """See Ranks.kill."""
        running = ray.wait(self._runs, num_returns=len(self._runs), timeout=0)[1]
        for pid in (pid for pid, run in zip(self._pids, self._runs, strict=True) if run in running):
            try:
                os.kill(pid, signal.SIGKILL)  # on this machine; Ray's own word would not reach a stopped process
            except ProcessLookupError:
                continue
        for actor in self._actors:
            ray.kill(actor)


def _actor(pool: PoolConfig, rank: int) -> Any:
    options = {
        "num_cpus": pool.num_cpus,
        "num_gpus": pool.num_gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(get_current_placement_group(), rank),
        "runtime_env": {"env_vars": dict(OPENMP_ENVIRONMENT)},
    }
    return ray.remote(RankActor).options(**options).remote()


def _why(rank: int, run: Any) -> str:
    try:
        ray.get(run)
    except RayError as error:
        return f"rank {rank} of the tensor-parallel group has ended: {error}"
    return f"rank {rank} of the tensor-parallel group has ended"
