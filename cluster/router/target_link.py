"""Where one request runs: picks a target replica, and another whenever that one is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from cluster.messages.answer import ErrorKind, RequestError
from cluster.messages.rounds import (
    Abort,
    DraftBlock,
    Refusal,
    RefusalReason,
    SetDraftLimit,
    Submit,
    TargetCommand,
    TargetEvent,
)
from cluster.router.observer import ResumeCause
from cluster.router.replica_set import Replica, ReplicaSet
from cluster.transport.limits import CodecError
from cluster.transport.stream import StreamClosed

logger = logging.getLogger(__name__)

TargetReplicas = ReplicaSet[TargetCommand, TargetEvent]

_HOPELESS = {RefusalReason.TOO_LONG: ErrorKind.CONTEXT_LENGTH, RefusalReason.UNSUPPORTED: ErrorKind.INVALID}
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class FailoverLimits:
    """How long a request looks for a target replica before it fails.

    wait_s: without any replica to run on. max_moves: in a row without a new token. first_commit_s, commit_s: silence
    after which a replica is taken for hung (a queue may be long, so the first commit on each gets more time).
    """

    wait_s: float = 60.0
    max_moves: int = 8
    first_commit_s: float = 300.0
    commit_s: float = 60.0
    first_retry_s: float = 0.05
    last_retry_s: float = 1.0


@dataclass(frozen=True, slots=True)
class TargetCallbacks:
    """What a link tells its request."""

    make_submit: Callable[[], Submit]  # with everything committed so far
    on_event: Callable[[TargetEvent], None]
    on_move: Callable[[ResumeCause], None]
    on_failure: Callable[[RequestError], None]


class TargetLink:
    """Owns one request's place on a target replica, from Submit to its last commit or Abort."""

    def __init__(
        self,
        request_id: str,
        replicas: TargetReplicas,
        callbacks: TargetCallbacks,
        limits: FailoverLimits,
        clock: Callable[[], float],
    ) -> None:
        self._request_id = request_id
        self._replicas = replicas
        self._callbacks = callbacks
        self._limits = limits
        self._clock = clock
        self._replica: Replica[TargetCommand, TargetEvent] | None = None
        self._tried: set[str] = set()  # connections that failed the request since it last got a token
        self._num_moves = 0  # in a row, without a new token
        self._has_progressed = False
        self._has_progressed_here = False
        self._alive_at = 0.0  # when the replica last showed a sign of life, or was given the request
        self._homeless_since: float | None = None
        self._retry_s = limits.first_retry_s
        self._retry: asyncio.TimerHandle | None = None
        self._watchdog: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Submit the request, or wait for a replica that takes it."""
        self._watch(self._limits.first_commit_s)
        if not self._place():
            self._wait()

    def send(self, hint: DraftBlock | SetDraftLimit) -> None:
        """Propose guesses or bound them. Between two replicas that is dropped: the next Submit says it all."""
        if self._replica is not None:
            try:
                self._replica.stream.send(hint)
            except StreamClosed:  # the stream's own callback moves the request
                return

    def progress(self) -> None:
        """A commit brought something new."""
        self._alive_at = self._clock()
        self._num_moves = 0
        self._has_progressed = self._has_progressed_here = True
        self._tried.clear()
        self._retry_s = self._limits.first_retry_s

    def move(self, cause: ResumeCause) -> None:
        """Go on elsewhere, from what has been committed so far."""
        self._leave(abort=True)
        self._resettle(cause)

    def refuse(self, refusal: Refusal) -> None:
        """The replica holds nothing for the request any more."""
        if refusal.reason is RefusalReason.INTERNAL:  # its message may be any exception's text: not for clients
            where = "nowhere" if self._replica is None else self._replica.key
            logger.error("request %s failed on %s: %s", self._request_id, where, refusal.message)
        self._leave(abort=False)
        if (kind := _HOPELESS.get(refusal.reason)) is not None:
            self._fail(kind, refusal.message)
        elif self._has_progressed or refusal.reason is RefusalReason.DRAINING:
            self._resettle(ResumeCause.REFUSED)
        elif self._place():
            return
        elif refusal.reason is RefusalReason.QUEUE_FULL:
            self._fail(ErrorKind.OVERLOADED, refusal.message)
        else:
            self._fail(ErrorKind.INTERNAL, "the target replica failed on this request")

    def finish(self) -> None:
        """The last commit has come: the replica has freed everything already."""
        self._stop_timers()
        self._leave(abort=False)

    def close(self) -> None:
        """Leave at once; the replica frees everything. Idempotent."""
        self._stop_timers()
        self._leave(abort=True)

    # --- finding a replica -------------------------------------------------------------------------------------------

    def _place(self) -> bool:
        """Submit to the best replica that has not failed the request; False: there is none.

        A request that no wire can carry fails here, which settles it too.
        """
        while (replica := self._replicas.pick(self._request_id, self._tried)) is not None:
            replica.attach(self._request_id, self._callbacks.on_event, self._on_lost)
            self._replica = replica
            self._alive_at = self._clock()
            self._has_progressed_here = False
            try:
                replica.stream.send(self._callbacks.make_submit())
            except StreamClosed:
                self._leave(abort=False)
                continue
            except CodecError as error:
                self._leave(abort=False)
                self._fail(ErrorKind.INVALID, f"the request cannot be sent: {error}")
            self._homeless_since = None
            return True
        return False

    def _resettle(self, cause: ResumeCause) -> None:
        self._num_moves += 1
        self._callbacks.on_move(cause)
        if self._num_moves > self._limits.max_moves:
            self._fail(ErrorKind.UNAVAILABLE, f"{self._num_moves} target replicas in a row gave the request up")
        elif not self._place():
            self._wait()

    def _wait(self) -> None:
        """Nobody to run on: look again soon, at those that failed before too, for as long as the limits allow."""
        now = self._clock()
        if self._homeless_since is None:
            self._homeless_since = now
        if now - self._homeless_since >= self._limits.wait_s:
            self._fail(ErrorKind.UNAVAILABLE, f"no target replica became ready within {self._limits.wait_s:g} s")
            return
        self._retry = asyncio.get_running_loop().call_later(self._retry_s, self._look_again)
        self._retry_s = min(self._limits.last_retry_s, self._retry_s * 2)

    def _look_again(self) -> None:
        self._retry = None
        self._tried.clear()
        if not self._place():
            self._wait()

    def _fail(self, kind: ErrorKind, message: str) -> None:
        retry_after_s = _RETRY_AFTER_S if kind in (ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE) else None
        self._callbacks.on_failure(RequestError(kind, message, retry_after_s=retry_after_s))

    # --- losing one --------------------------------------------------------------------------------------------------

    def _on_lost(self) -> None:
        self._leave(abort=False)
        self._resettle(ResumeCause.LOST)

    def _leave(self, abort: bool) -> None:
        replica, self._replica = self._replica, None
        if replica is None:
            return
        replica.detach(self._request_id)
        self._tried.add(replica.key)
        if abort:
            try:
                replica.stream.send(Abort(self._request_id))
            except StreamClosed:  # then the replica has dropped everything of this router
                return

    def _watch(self, delay_s: float) -> None:
        self._watchdog = asyncio.get_running_loop().call_later(delay_s, self._check_alive)

    def _check_alive(self) -> None:
        limit_s = self._limits.commit_s if self._has_progressed_here else self._limits.first_commit_s
        silence_s = self._clock() - self._alive_at
        if self._replica is not None and silence_s >= limit_s:
            self._watch(limit_s)
            self.move(ResumeCause.SILENT)
        else:
            self._watch(max(limit_s - silence_s, limit_s / 10))

    def _stop_timers(self) -> None:
        for timer in (self._retry, self._watchdog):
            if timer is not None:
                timer.cancel()
        self._retry = self._watchdog = None
