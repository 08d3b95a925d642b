"""Who guesses for one request: its session on a draft replica, and the replicas it asks no more."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from cluster.messages.rounds import Close, Committed, DraftCommand, DraftEvent, Open, Refusal, RefusalReason
from cluster.router.replica_set import Replica, ReplicaSet
from cluster.transport.limits import CodecError
from cluster.transport.stream import StreamClosed

DraftReplicas = ReplicaSet[DraftCommand, DraftEvent]

MAX_STRIKES = 3  # failed sessions in a row on one replica; a lost frame costs a session, and is no fault of the replica


@dataclass(frozen=True, slots=True)
class DraftOffer:
    """Whether a draft session is open or could be, and the version of the model behind it, if it is known."""

    is_available: bool
    version: str | None


NO_OFFER = DraftOffer(False, None)


class DraftLink:
    """Owns one request's draft session, wherever it is."""

    def __init__(
        self,
        request_id: str,
        replicas: DraftReplicas | None,
        on_event: Callable[[DraftEvent], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._request_id = request_id
        self._replicas = replicas
        self._on_event = on_event
        self._on_lost = on_lost
        self._replica: Replica[DraftCommand, DraftEvent] | None = None
        self._avoided: set[str] = set()  # connection keys
        self._unwanted: Set[str] = frozenset()  # versions
        self._num_strikes = 0

    def offer(self, unwanted: Set[str]) -> DraftOffer:
        """What guesses, or would guess if a session were opened now; unwanted versions are the last resort."""
        self._unwanted = unwanted
        replica = self._replica or self._pick()
        return NO_OFFER if replica is None else DraftOffer(True, replica.info.version)

    def open(self, command: Open) -> bool:
        """Start a session on the best replica that is not avoided; False: there is none."""
        while (replica := self._pick()) is not None:
            replica.attach(self._request_id, self._on_event, self._lose)
            self._replica = replica
            if self._send(command):
                return True
            self._avoid()
        return False

    def send(self, command: Committed) -> bool:
        """Tell the session about a commit; False: it cannot be told, and its replica is avoided from now on."""
        if self._send(command):
            return True
        self._avoid()
        return False

    def close(self) -> None:
        """End the session, if there is one; the replica frees everything. Idempotent."""
        if self._replica is not None:
            self._send(Close(self._request_id))
            self._leave()

    def refuse(self, refusal: Refusal) -> None:
        """The replica has ended the session: ask it again only if a lost frame may have been the reason."""
        self._num_strikes += 1
        if refusal.reason is RefusalReason.INTERNAL and self._num_strikes < MAX_STRIKES:
            self._leave()
        else:
            self._avoid()

    def give_up(self) -> None:
        """The replica is too slow for this request: close the session and ask it no more."""
        self._send(Close(self._request_id))
        self._avoid()

    def prove_useful(self) -> None:
        """A round was answered in time."""
        self._num_strikes = 0

    def _pick(self) -> Replica[DraftCommand, DraftEvent] | None:
        if self._replicas is None:
            return None
        unwanted = self._replicas.of_versions(self._unwanted) if self._unwanted else ()
        wanted = self._replicas.pick(self._request_id, self._avoided.union(unwanted))
        return wanted if wanted is not None or not unwanted else self._replicas.pick(self._request_id, self._avoided)

    def _send(self, command: DraftCommand) -> bool:
        if self._replica is None:
            return False
        try:
            self._replica.stream.send(command)
        except (StreamClosed, CodecError):  # speculation never fails a request
            return False
        return True

    def _lose(self) -> None:
        self._avoid()
        self._on_lost()

    def _avoid(self) -> None:
        if self._replica is not None:
            self._avoided.add(self._replica.key)
            self._num_strikes = 0
        self._leave()

    def _leave(self) -> None:
        replica, self._replica = self._replica, None
        if replica is not None:
            replica.detach(self._request_id)
