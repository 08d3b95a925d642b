"""What the target's and the draft's engines share: a thread that takes commands, runs steps and hands out events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from cluster.core.step import SchedulerOutput, SchedulerStats, StepStats
from cluster.messages.rounds import PoolLoad, Refusal, RefusalReason
from cluster.runtime.faults import FaultLog
from cluster.runtime.inbox import Inbox
from cluster.runtime.load_report import LoadReporter, load_of
from cluster.runtime.work import Runner, RunnerLost, Work

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")

MAX_FAILED_STEPS = 8  # in a row: more than bad luck, the replica must be replaced
STALL_TIMEOUT_S = 300.0  # a step that runs this long will never end
_HAND_OVER_TIMEOUT_S = 5.0


class EngineError(RuntimeError):
    """An engine that cannot serve any more."""


class EngineLoop(Generic[CommandT, EventT]):
    """Owns an engine's thread, its inbox and its health.

    `on_events` and `on_step` are called from the engine's thread, once per step, and must not block; set them before
    start(). `on_closed` is called once, after the last event, when the engine has ended for whatever reason.
    handle, drain, stop, abandon, stats and check_health may be called from any thread, step() only without start().
    """

    def __init__(
        self,
        work: Work[CommandT, EventT],
        runner: Runner,
        on_events: Callable[[list[EventT | PoolLoad | Refusal]], None] | None = None,
        on_step: Callable[[StepStats], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_events = on_events
        self.on_step = on_step
        self.on_closed: Callable[[], None] | None = None
        self.faults = FaultLog()
        self._work = work
        self._runner = runner
        self._clock = clock
        self._inbox: Inbox[CommandT] = Inbox(clock)
        self._load = LoadReporter()
        self._stats = work.stats()
        self._num_failed_steps = 0  # in a row
        self._step_began: float | None = None
        self._thread: threading.Thread | None = None
        self._crash: Exception | None = None
        self._is_stopping = False
        self._is_draining = False
        self._must_hand_over = False
        self._drained = threading.Event()
        self._gate = threading.Lock()  # between the last look into the inbox and a command that comes after it
        self._is_closed = False

    # --- any thread --------------------------------------------------------------------------------------------------

    def wrap(
        self, work: Callable[[Work[CommandT, EventT]], Work[CommandT, EventT]], runner: Callable[[Runner], Runner]
    ) -> None:
        """Put something around what this engine drives, to watch it; before start()."""
        self._work = work(self._work)
        self._runner = runner(self._runner)

    def start(self) -> None:
        """Start the engine's thread."""
        if self._thread is not None:
            raise RuntimeError("an engine is started once")
        self._thread = threading.Thread(target=self._serve, name="paceline-engine", daemon=True)
        self._thread.start()

    def handle(self, commands: Sequence[CommandT]) -> None:
        """Leave commands for the next step. After stop() they are refused at once, from the calling thread."""
        with self._gate:
            if not self._is_closed:
                self._inbox.put(commands)
                return
        answers = (
            self._work.refusal_of(command, RefusalReason.DRAINING, "the replica has stopped") for command in commands
        )
        self._emit([answer for answer in answers if answer is not None])

    def drain(self, timeout_s: float) -> bool:
        """Refuse what is new and let what runs finish; whatever is left after `timeout_s` is refused too (False).

        Needs a started engine, and leaves it running.
        """
        if self._thread is None:
            raise RuntimeError("only a started engine can drain")
        self._is_draining = True
        self._inbox.wake()
        if self._drained.wait(timeout_s):
            return True
        self._must_hand_over = True
        self._inbox.wake()
        self._drained.wait(_HAND_OVER_TIMEOUT_S)
        return False

    def stop(self) -> None:
        """End after the step that runs now; refuse whatever is left. Returns when the thread has ended."""
        self._is_stopping = True
        self._inbox.wake()
        if self._thread is None:
            self._close()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def abandon(self, error: Exception) -> None:
        """End as after a crash, because the runner is lost: refuse whatever is open. Returns at once."""
        self._crash = error
        self._is_stopping = True
        self._inbox.wake()

    def stats(self) -> SchedulerStats:
        """Occupancy after the latest step."""
        return self._stats

    def load(self) -> PoolLoad:
        """Occupancy after the latest step, as routers see it."""
        return load_of(self._stats, self._is_draining)

    def check_health(self) -> None:
        """Raises EngineError if the engine has ended, only fails, or hangs."""
        if self._crash is not None:
            raise EngineError(f"the engine's thread has died: {self._crash}") from self._crash
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise EngineError(f"the last {self._num_failed_steps} steps failed")
        began = self._step_began
        if began is not None and self._clock() - began > STALL_TIMEOUT_S:
            raise EngineError(f"a step has been running for more than {STALL_TIMEOUT_S:.0f} s")

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def step(self) -> float | None:
        """Take the commands and run one step.

        Returns when there is more to do on the engine's clock: now or earlier means at once, None not before a command.
        """
        is_draining = self._is_draining
        self._work.is_draining = is_draining
        self._take_commands()
        step = self._schedule()
        if not step.scheduled:
            self._settle(is_draining)
            return step.wake_at
        self._emit(self._work.take_events())  # refusals and ready blocks need not wait for the model
        stats = self._run(step)
        self._settle(is_draining)
        self._observe(stats)
        return self._clock()

    def _take_commands(self) -> None:
        for received_at, command in self._inbox.take():
            try:
                self._work.handle(command, received_at)
            except Exception as error:  # noqa: BLE001 - one bad command must not end the others
                self.faults.record("a command failed", error)
                self._work.refuse(command, RefusalReason.INTERNAL, f"the command failed: {error}")

    def _schedule(self) -> SchedulerOutput:
        if self._must_hand_over:
            self._work.refuse_all(RefusalReason.DRAINING, "the replica is shutting down")
        try:
            return self._work.schedule(self._clock())
        except Exception as error:  # noqa: BLE001 - nobody knows which sequence it was, so all of them go
            self.faults.record("scheduling failed", error)
            self._work.refuse_all(RefusalReason.INTERNAL, f"scheduling failed: {error}")
            return SchedulerOutput()

    def _run(self, step: SchedulerOutput) -> StepStats | None:
        self._step_began = began = self._clock()
        try:
            output = self._runner.execute(step, self._inbox.has_waiting)
            now = self._clock()
            stats = self._work.apply(step, output, now, now - began)
        except RunnerLost:  # nothing to fail one by one: all requests are refused as the engine ends
            raise
        except Exception as error:  # noqa: BLE001 - a failed step ends its own sequences and no others
            self._num_failed_steps += 1
            self.faults.record("a step failed", error)
            self._work.fail(step, f"the step failed: {error}")
            return None
        finally:
            self._step_began = None
        self._num_failed_steps = 0
        for message in output.failed.values():
            self.faults.record(message)
        return stats

    def _settle(self, is_draining: bool) -> None:
        """Hand out what happened, publish occupancy, and tell a drain that waits when nothing is left."""
        self._stats = self._work.stats()
        load = self._load.poll(load_of(self._stats, is_draining), self._clock())
        self._emit([*self._work.take_events(), *([] if load is None else [load])])
        if is_draining and self._work.is_idle:
            self._drained.set()

    def _emit(self, events: Sequence[EventT | PoolLoad | Refusal]) -> None:
        if not events or self.on_events is None:
            return
        try:
            self.on_events(list(events))
        except Exception as error:  # noqa: BLE001 - a listener's fault is not the sequences'
            self.faults.record("on_events failed", error)

    def _observe(self, stats: StepStats | None) -> None:
        if stats is None or self.on_step is None:
            return
        try:
            self.on_step(stats)
        except Exception as error:  # noqa: BLE001 - statistics must not end a sequence
            self.faults.record("on_step failed", error)

    def _serve(self) -> None:
        try:
            while not self._is_stopping:
                self._inbox.wait(_earliest(self.step(), self._load.due_at))
        except Exception as error:  # noqa: BLE001 - reported by check_health; nobody may be left waiting for an answer
            self._crash = error
            self.faults.record("the engine's thread has died", error)
        self._close()

    def _close(self) -> None:
        """Answer everything that is still open; what comes later is refused where it comes."""
        with self._gate:
            self._is_closed = True
        self._work.is_draining = True
        try:
            self._take_commands()
            self._work.refuse_all(RefusalReason.DRAINING, "the replica has stopped")
            self._settle(is_draining=True)
        except Exception as error:  # noqa: BLE001 - after a crash even this may fail, and a drain must not wait for it
            self.faults.record("refusing what was left failed", error)
        self._drained.set()
        try:
            if self.on_closed is not None:
                self.on_closed()
        except Exception as error:  # noqa: BLE001 - the thread ends here, and nobody above could do more
            self.faults.record("on_closed failed", error)


def _earliest(*times: float | None) -> float | None:
    return min((time for time in times if time is not None), default=None)
