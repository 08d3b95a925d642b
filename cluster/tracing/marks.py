"""One process's marks: what passed where and when, on the clock that all processes of a Linux machine share."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cluster.messages.rounds import (
    Commit,
    Committed,
    DraftBlock,
    DraftCommand,
    DraftEvent,
    Open,
    TargetCommand,
    TargetEvent,
)

TRACE_VARIABLE = "PACELINE_TRACE"  # names the folder for the files; tracing is off without it
MAX_MARKS = 400_000  # of one process; the latest are kept


class Place(StrEnum):
    """Where a mark is stamped; the name begins with the process."""

    TARGET_RECEIVED = "target.received"  # a proposal's frame is decoded on the event loop
    TARGET_TAKEN = "target.taken"  # by the engine's thread
    TARGET_STEP = "target.step"  # the engine begins to run a step
    TARGET_FORWARD = "target.forward"  # the batch is built, the model begins
    TARGET_LOGITS = "target.logits"  # the model has returned
    TARGET_SAMPLED = "target.sampled"
    TARGET_APPLIED = "target.applied"  # verified, cut, appended
    TARGET_EMITTED = "target.emitted"  # the commit leaves the engine's thread
    TARGET_SENT = "target.sent"  # and is encoded on the event loop
    ROUTER_COMMIT = "router.commit"  # a commit's frame is decoded
    ROUTER_ASKED = "router.asked"  # the committed tokens are encoded for the draft
    DRAFT_RECEIVED = "draft.received"
    DRAFT_TAKEN = "draft.taken"
    DRAFT_STEP = "draft.step"
    DRAFT_FORWARD = "draft.forward"
    DRAFT_LOGITS = "draft.logits"
    DRAFT_SAMPLED = "draft.sampled"
    DRAFT_APPLIED = "draft.applied"
    DRAFT_EMITTED = "draft.emitted"
    DRAFT_SENT = "draft.sent"
    ROUTER_BLOCK = "router.block"  # a block's frame is decoded
    ROUTER_PROPOSED = "router.proposed"  # and encoded for the target
    ROUTER_ANSWERED = "router.answered"  # the text is decoded and handed to the proxy
    CLIENT_RECEIVED = "client.received"


@dataclass(frozen=True, slots=True)
class Mark:
    """`length`: tokens of the sequence up to and with what passed, guesses apart; 0 for answers, which are counted up.

    num_tokens: committed, guessed or computed at this place. at_ns: CLOCK_MONOTONIC.
    """

    place: Place
    request_id: str
    length: int
    num_tokens: int
    at_ns: int


Message = TargetCommand | TargetEvent | DraftCommand | DraftEvent


class TraceLog:
    """Owns the latest marks of one process. Any thread may mark."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns, limit: int = MAX_MARKS) -> None:
        self._clock_ns = clock_ns
        self._marks: deque[Mark] = deque(maxlen=limit)

    def mark(self, place: Place, request_id: str, length: int, num_tokens: int) -> None:
        self._marks.append(Mark(place, request_id, length, num_tokens, self._clock_ns()))

    def pass_message(self, place: Place, message: Message) -> None:
        """Mark a message if it belongs to a round: a commit, committed tokens that ask for guesses, or guesses."""
        match message:
            case Commit(request_id=request_id, base_len=base_len, token_ids=token_ids) if token_ids:
                self.mark(place, request_id, base_len + len(token_ids), len(token_ids))
            case DraftBlock(request_id=request_id, committed_len=length, token_ids=token_ids) if token_ids:
                self.mark(place, request_id, length, len(token_ids))
            case Committed(request_id=request_id, base_len=base_len, token_ids=token_ids, draft_len=draft_len):
                if draft_len:
                    self.mark(place, request_id, base_len + len(token_ids), len(token_ids))
            case Open(request_id=request_id, token_ids=token_ids, draft_len=draft_len) if draft_len:
                self.mark(place, request_id, len(token_ids), len(token_ids))

    def marks(self) -> tuple[Mark, ...]:
        return tuple(self._marks)

    def write(self, path: Path) -> None:
        """A line of JSON for each mark."""
        with path.open("w") as lines:
            for mark in self.marks():
                fields = [mark.place, mark.request_id, mark.length, mark.num_tokens, mark.at_ns]
                lines.write(json.dumps(fields) + "\n")


def read_marks(paths: Iterable[Path]) -> Iterator[Mark]:
    """The marks of several processes' files."""
    for path in paths:
        with path.open() as lines:
            for line in lines:
                place, request_id, length, num_tokens, at_ns = json.loads(line)
                yield Mark(Place(place), request_id, length, num_tokens, at_ns)


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A process's log and where it is written when the process ends."""

    log: TraceLog
    path: Path

    def write(self) -> None:
        self.log.write(self.path)


def trace_file(process: str) -> TraceFile | None:
    """What this process traces into; None when tracing is off. `process`: target, draft or router."""
    folder = os.environ.get(TRACE_VARIABLE)
    return None if folder is None else TraceFile(TraceLog(), Path(folder) / f"{process}-{os.getpid()}.jsonl")
