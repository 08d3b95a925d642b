"""Parallel loops for kernels: a team of native threads that any thread of the process may borrow.

numba's own layers do not serve: its workqueue aborts the process when two threads use it at once, and its OpenMP layer
needs a system libgomp, which then runs a second pool beside the one that torch brings.

One launch is a number of tasks. The caller and the workers take tasks from one shared word until none is left:

    ticket   | launch number (32 bits) | tasks not yet taken (32 bits) |

Taking is a compare-and-swap that subtracts one, so a worker that wakes late, or is not given a core at all, is never
waited for unless it holds a task. Whoever finds the team in use runs its own tasks alone: with as many callers as
cores that is the best schedule anyway, and nothing ever waits for another caller.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
from numpy.typing import NDArray

from cluster.runtime.kernels.atomics import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_task,
    pause,
    sleep_while,
    swap_if,
    wake,
)
from cluster.runtime.kernels.compiling import Records, native
from cluster.runtime.kernels.simd import address_of

# Byte offsets in the team's memory; words that different threads write lie on different cache lines.
_TICKET, _SLEEPERS, _DONE, _OWNER_SLEEPS = 0, 64, 128, 136
_FUNCTION, _ARGS, _NUM_TASKS, _BUSY, _STOP, _SPIN, _WORKERS = 192, 200, 208, 256, 320, 328, 336
_LAUNCH_NUMBER = _TICKET + 4  # upper half of the ticket on a little-endian machine
_TEAM_BYTES, _LINE = 384, 64
_COUNT_MASK = 0xFFFFFFFF
_EVERYONE = 1 << 30

# How often an idle thread looks for work before it sleeps, some 25 ns each. Long enough to bridge the gap between two
# launches of one step (some microseconds of Python), short enough not to take a core from another pool's process
# between steps.
SPIN_ROUNDS = 1500


@native
def _take_tasks(team: int) -> None:
    """Run tasks of the current launch until none is left to take."""
    ticket = atomic_load(team + _TICKET)
    while ticket & _COUNT_MASK:
        if swap_if(team + _TICKET, ticket, ticket - 1):
            # A launch ends only after its last task, so what it wrote stays valid until _DONE is counted up.
            num_tasks = atomic_load(team + _NUM_TASKS)
            task = num_tasks - (ticket & _COUNT_MASK)
            call_task(atomic_load(team + _FUNCTION), atomic_load(team + _ARGS), task)
            if atomic_add(team + _DONE, 1) + 1 == num_tasks and atomic_load(team + _OWNER_SLEEPS):
                wake(team + _DONE, 1)
        ticket = atomic_load(team + _TICKET)


@native
def _wait_for_launch(team: int, seen: int) -> None:
    for _ in range(atomic_load(team + _SPIN)):
        if atomic_load(team + _TICKET) != seen:
            return
        pause(0)
    atomic_add(team + _SLEEPERS, 1)
    # A launch changes the ticket first and looks for sleepers second: it either sees this one or stops its sleep.
    sleep_while(team + _LAUNCH_NUMBER, seen >> 32)
    atomic_add(team + _SLEEPERS, -1)


@native
def _work(team: int) -> None:
    """A worker thread's life."""
    while True:
        _take_tasks(team)
        ticket = atomic_load(team + _TICKET)
        if atomic_load(team + _STOP):
            return
        if ticket & _COUNT_MASK == 0:
            _wait_for_launch(team, ticket)


@native
def _publish(team: int, num_tasks: int) -> None:
    launch = ((atomic_load(team + _TICKET) >> 32) + 1) & 0x7FFFFFFF
    atomic_store(team + _TICKET, (launch << 32) | num_tasks)
    if atomic_load(team + _SLEEPERS):
        wake(team + _LAUNCH_NUMBER, num_tasks - 1 if num_tasks else _EVERYONE)


@native
def _wait_until_done(team: int, num_tasks: int) -> None:
    for _ in range(atomic_load(team + _SPIN)):
        if atomic_load(team + _DONE) == num_tasks:
            return
        pause(0)
    atomic_store(team + _OWNER_SLEEPS, 1)
    done = atomic_load(team + _DONE)
    while done != num_tasks:
        sleep_while(team + _DONE, done)
        done = atomic_load(team + _DONE)
    atomic_store(team + _OWNER_SLEEPS, 0)


@native
def parallel_for(team: int, function: int, args: int, num_tasks: int) -> None:
    """Call function(args, task) for task = 0 .. num_tasks - 1, in any order and on any threads; returns after all."""
    alone = num_tasks < 2 or atomic_load(team + _WORKERS) == 0
    if alone or not swap_if(team + _BUSY, 0, 1):
        for task in range(num_tasks):
            call_task(function, args, task)
        return
    atomic_store(team + _FUNCTION, function)
    atomic_store(team + _ARGS, args)
    atomic_store(team + _NUM_TASKS, num_tasks)
    atomic_store(team + _DONE, 0)
    _publish(team, num_tasks)
    _take_tasks(team)
    _wait_until_done(team, num_tasks)
    atomic_store(team + _BUSY, 0)


@native
def launch(team: int, function: int, args: Records, num_tasks: int) -> None:
    """parallel_for whose args are an array of records: being this call's argument keeps the array until it returns."""
    parallel_for(team, function, address_of(args), num_tasks)


@native
def _set_word(team: int, offset: int, value: int) -> None:
    atomic_store(team + offset, value)


@native
def _acquire(team: int) -> bool:
    return bool(swap_if(team + _BUSY, 0, 1))


class KernelTeam:
    """Owns the threads that run kernels beside their caller: num_threads - 1 of them, asleep while idle."""

    def __init__(self, num_threads: int) -> None:
        """Raises ValueError for fewer than one thread."""
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        self.num_threads = num_threads
        self._memory = np.zeros(_TEAM_BYTES + _LINE, dtype=np.uint8)
        base = self._memory.ctypes.data
        self.address = base + -base % _LINE
        _set_word(self.address, _SPIN, SPIN_ROUNDS)
        _set_word(self.address, _WORKERS, num_threads - 1)
        threads = [self._start(index) for index in range(1, num_threads)]
        self._finalizer = weakref.finalize(self, _stop, self._memory, self.address, threads)

    def _start(self, index: int) -> threading.Thread:
        thread = threading.Thread(target=_work, args=(self.address,), name=f"kernels-{index}", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """End the threads; later launches run on their caller alone. Idempotent."""
        self._finalizer()


def _stop(memory: NDArray[np.uint8], team: int, threads: list[threading.Thread]) -> None:
    """`memory` is held so that it outlives the threads that read it."""
    _set_word(team, _WORKERS, 0)
    _set_word(team, _STOP, 1)
    # Not acquired: a launch is under way in another thread. No thread alive: the process is a fork of theirs.
    while any(thread.is_alive() for thread in threads) and not _acquire(team):
        threads[0].join(0.001)
    _publish(team, 0)
    for thread in threads:
        thread.join()
    _set_word(team, _BUSY, 0)
