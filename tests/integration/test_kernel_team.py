"""The team of kernel threads: every task once, any number of callers, no thread left behind."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numba import carray

from cluster.runtime.kernels.compiling import Record, native, task_body
from cluster.runtime.kernels.simd import float_pointer
from cluster.runtime.kernels.team import KernelTeam, launch

pytestmark = pytest.mark.integration

_COUNTS = np.dtype([("counts", np.int64), ("size", np.int64)])


@task_body(_COUNTS)
def _count_task(args: Record, task: int) -> None:
    a = carray(args, 1)[0]
    counts = carray(float_pointer(a.counts), a.size)
    counts[task] += 1


@native
def _count(team: int, function: int, counts: int, size: int, num_tasks: int) -> None:
    args = np.empty(1, _COUNTS)
    args[0].counts, args[0].size = counts, size
    launch(team, function, args, num_tasks)


def run_tasks(team: KernelTeam, num_tasks: int, repeats: int = 1) -> np.ndarray:
    """How often each task ran, [num_tasks + 1]: the last is never to be touched."""
    counts = np.zeros(num_tasks + 1, np.float32)
    for _ in range(repeats):
        _count(team.address, _count_task.address, counts.ctypes.data, counts.size, num_tasks)
    return counts


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("num_tasks", [0, 1, 2, 3, 1000])
def test_every_task_runs_exactly_once(num_threads: int, num_tasks: int) -> None:
    team = KernelTeam(num_threads)
    assert run_tasks(team, num_tasks).tolist() == [1] * num_tasks + [0]
    team.close()


def test_many_launches_in_a_row_lose_no_task() -> None:
    team = KernelTeam(4)
    assert run_tasks(team, 7, repeats=20_000).tolist() == [20_000] * 7 + [0]
    team.close()


def test_callers_on_several_threads_share_a_team() -> None:
    team, results = KernelTeam(3), []
    callers = [threading.Thread(target=lambda: results.append(run_tasks(team, 50, 2_000))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [counts.tolist() for counts in results] == [[2_000] * 50 + [0]] * 4
    team.close()


def test_a_closed_team_has_no_threads_and_still_runs_launches_on_their_caller() -> None:
    before = threading.active_count()
    team = KernelTeam(3)
    assert threading.active_count() == before + 2
    team.close()
    team.close()
    assert threading.active_count() == before
    assert run_tasks(team, 10).tolist() == [1] * 10 + [0]


def test_a_team_can_close_while_another_thread_launches() -> None:
    for _ in range(50):
        team, results = KernelTeam(2), []
        caller = threading.Thread(target=lambda team=team, results=results: results.append(run_tasks(team, 9, 50)))
        caller.start()
        team.close()
        caller.join()
        assert results[0].tolist() == [50] * 9 + [0]


def test_a_dropped_team_ends_its_threads() -> None:
    before = threading.active_count()
    run_tasks(KernelTeam(4), 3)
    assert threading.active_count() == before


def test_a_team_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        KernelTeam(0)
