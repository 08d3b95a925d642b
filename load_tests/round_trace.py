"""Joins the marks of several processes into speculative rounds, and says where their time goes. Pure."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cluster.tracing.marks import Mark, Place

# What one committed length passes, in order, until the engine commits again; the draft's steps are in between.
_TO_DRAFT = (
    Place.TARGET_EMITTED,
    Place.TARGET_SENT,
    Place.ROUTER_COMMIT,
    Place.ROUTER_ASKED,
    Place.DRAFT_RECEIVED,
    Place.DRAFT_TAKEN,
)
_TO_TARGET = (
    Place.DRAFT_EMITTED,
    Place.DRAFT_SENT,
    Place.ROUTER_BLOCK,
    Place.ROUTER_PROPOSED,
    Place.TARGET_RECEIVED,
    Place.TARGET_TAKEN,
    Place.TARGET_STEP,
    Place.TARGET_FORWARD,
    Place.TARGET_LOGITS,
    Place.TARGET_SAMPLED,
    Place.TARGET_APPLIED,
)
_MESSAGES = frozenset((*_TO_DRAFT, *_TO_TARGET))
_DRAFT_STEPS = frozenset(
    (Place.DRAFT_STEP, Place.DRAFT_FORWARD, Place.DRAFT_LOGITS, Place.DRAFT_SAMPLED, Place.DRAFT_APPLIED)
)
_ANSWERS = frozenset((Place.ROUTER_ANSWERED, Place.CLIENT_RECEIVED))
_FORWARDS = ((Place.DRAFT_FORWARD, Place.DRAFT_LOGITS), (Place.TARGET_FORWARD, Place.TARGET_LOGITS))

NAMES: Mapping[tuple[Place, Place], str] = {
    (Place.TARGET_EMITTED, Place.TARGET_SENT): "target: engine → event loop, encode",
    (Place.TARGET_SENT, Place.ROUTER_COMMIT): "wire: target → router, decode",
    (Place.ROUTER_COMMIT, Place.ROUTER_ASKED): "router: policy, session, encode",
    (Place.ROUTER_ASKED, Place.DRAFT_RECEIVED): "wire: router → draft, decode",
    (Place.DRAFT_RECEIVED, Place.DRAFT_TAKEN): "draft: event loop → engine",
    (Place.DRAFT_TAKEN, Place.DRAFT_STEP): "draft: commit, plan",
    (Place.DRAFT_STEP, Place.DRAFT_FORWARD): "draft: build batches",
    (Place.DRAFT_FORWARD, Place.DRAFT_LOGITS): "draft: model",
    (Place.DRAFT_LOGITS, Place.DRAFT_FORWARD): "draft: sample, go on in a chain",
    (Place.DRAFT_LOGITS, Place.DRAFT_SAMPLED): "draft: sample",
    (Place.DRAFT_SAMPLED, Place.DRAFT_APPLIED): "draft: apply",
    (Place.DRAFT_APPLIED, Place.DRAFT_STEP): "draft: plan the next step",
    (Place.DRAFT_APPLIED, Place.DRAFT_EMITTED): "draft: settle",
    (Place.DRAFT_TAKEN, Place.DRAFT_EMITTED): "draft: guesses kept, no step",
    (Place.DRAFT_EMITTED, Place.DRAFT_SENT): "draft: engine → event loop, encode",
    (Place.DRAFT_SENT, Place.ROUTER_BLOCK): "wire: draft → router, decode",
    (Place.ROUTER_BLOCK, Place.ROUTER_PROPOSED): "router: policy, session, encode (block)",
    (Place.ROUTER_PROPOSED, Place.TARGET_RECEIVED): "wire: router → target, decode",
    (Place.TARGET_RECEIVED, Place.TARGET_TAKEN): "target: event loop → engine",
    (Place.TARGET_TAKEN, Place.TARGET_STEP): "target: plan",
    (Place.TARGET_STEP, Place.TARGET_FORWARD): "target: build the batch",
    (Place.TARGET_FORWARD, Place.TARGET_LOGITS): "target: model",
    (Place.TARGET_LOGITS, Place.TARGET_SAMPLED): "target: sample",
    (Place.TARGET_SAMPLED, Place.TARGET_APPLIED): "target: verify, append",
    (Place.TARGET_APPLIED, Place.TARGET_EMITTED): "target: settle",
}


@dataclass(frozen=True, slots=True)
class Span:
    """From one mark to the next one."""

    begin: Place
    end: Place
    begin_ns: int
    end_ns: int

    @property
    def name(self) -> str:
        return NAMES[self.begin, self.end]

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns

    @property
    def is_forward(self) -> bool:
        return (self.begin, self.end) in _FORWARDS


@dataclass(frozen=True, slots=True)
class Round:
    """From a commit that leaves the target's engine to the next one, by way of the draft. Spans leave no gaps."""

    request_id: str
    length: int
    spans: tuple[Span, ...]

    @property
    def duration_ns(self) -> int:
        return self.spans[-1].end_ns - self.spans[0].begin_ns

    @property
    def outside_forwards(self) -> float:
        """The share of the round in which neither model runs."""
        return 1 - sum(span.duration_ns for span in self.spans if span.is_forward) / self.duration_ns

    def by_name(self) -> dict[str, int]:
        """Nanoseconds, in the order of the round; the draft's steps are summed."""
        total: dict[str, int] = defaultdict(int)
        for span in self.spans:
            total[span.name] += span.duration_ns
        return dict(total)


@dataclass(frozen=True, slots=True)
class Answer:
    """One commit on its way to the client."""

    router_ns: int  # leaves the target's engine → handed to the proxy as text
    proxy_ns: int  # → read by the client


@dataclass(frozen=True, slots=True)
class Trace:
    """What the marks of a run say. `left_out`: rounds that are not complete, by cause."""

    rounds: tuple[Round, ...]
    answers: tuple[Answer, ...]
    left_out: Mapping[str, int]


def join(marks: Iterable[Mark]) -> Trace:
    """Rounds in the order of time.

    A frame that came twice counts when it came first. A round without one of its marks, or with marks against the order
    of a round (the target went on without its block, the request moved), is left out.
    """
    rounds: list[Round] = []
    answers: list[Answer] = []
    left_out: Counter[str] = Counter()
    for request in _Request.by_id(marks):
        answers.extend(request.answers())
        for length in sorted(length for place, length in request.first if place is Place.ROUTER_ASKED):
            spans = request.round_at(length)
            if isinstance(spans, str):
                left_out[spans] += 1
            else:
                rounds.append(Round(request.request_id, length, spans))
    return Trace(tuple(sorted(rounds, key=lambda item: item.spans[0].begin_ns)), tuple(answers), left_out)


@dataclass(frozen=True, slots=True)
class _Request:
    """The marks of one request."""

    request_id: str
    first: Mapping[tuple[Place, int], Mark]  # by committed length; for the target's steps and for messages
    next_commit: Mapping[int, Mark]  # by the length that it builds on
    draft_steps: Sequence[Mark]
    written: Mapping[Place, Sequence[Mark]]

    @classmethod
    def by_id(cls, marks: Iterable[Mark]) -> Iterator[_Request]:
        grouped: dict[str, list[Mark]] = defaultdict(list)
        for mark in sorted(marks, key=lambda mark: mark.at_ns):
            grouped[mark.request_id].append(mark)
        for request_id, own in grouped.items():
            yield cls._of(request_id, own)

    @classmethod
    def _of(cls, request_id: str, marks: Sequence[Mark]) -> _Request:
        first: dict[tuple[Place, int], Mark] = {}
        for mark in marks:
            if mark.place in _MESSAGES:
                first.setdefault((mark.place, mark.length), mark)
        commits = [mark for (place, _), mark in first.items() if place is Place.TARGET_EMITTED]
        return cls(
            request_id,
            first,
            {mark.length - mark.num_tokens: mark for mark in reversed(commits)},
            [mark for mark in marks if mark.place in _DRAFT_STEPS],
            {place: [mark for mark in marks if mark.place is place and mark.num_tokens] for place in _ANSWERS},
        )

    def round_at(self, length: int) -> tuple[Span, ...] | str:
        """The spans of the round that follows `length` committed tokens, or why there are none."""
        head, tail = ([self.first.get((place, length)) for place in places] for places in (_TO_DRAFT, _TO_TARGET))
        for place, mark in zip((*_TO_DRAFT, *_TO_TARGET), (*head, *tail), strict=True):
            if mark is None:
                return f"no {place}"
        end = self.next_commit.get(length)
        if end is None:
            return "no next commit"
        known = [mark for mark in (*head, *self._steps_between(head[-1], tail[0]), *tail, end) if mark is not None]
        if any(after.at_ns < before.at_ns for before, after in pairwise(known)):
            return "out of order"
        if any((before.place, after.place) not in NAMES for before, after in pairwise(known)):
            return "a draft step is cut"
        return tuple(Span(a.place, b.place, a.at_ns, b.at_ns) for a, b in pairwise(known))

    def _steps_between(self, taken: Mark | None, emitted: Mark | None) -> Sequence[Mark]:
        if taken is None or emitted is None:
            return ()
        begin = bisect_right(self.draft_steps, taken.at_ns, key=lambda mark: mark.at_ns)
        return self.draft_steps[begin : bisect_left(self.draft_steps, emitted.at_ns, key=lambda mark: mark.at_ns)]

    def answers(self) -> Iterator[Answer]:
        """Commits whose tokens reached the client in a part of their own."""
        answered, received = (self._by_length(place) for place in (Place.ROUTER_ANSWERED, Place.CLIENT_RECEIVED))
        for (place, length), commit in self.first.items():
            if place is Place.TARGET_EMITTED and length in answered and length in received:
                yield Answer(answered[length] - commit.at_ns, received[length] - answered[length])

    def _by_length(self, place: Place) -> dict[int, int]:
        """Times by committed length: parts of an answer are counted up from the prompt's length."""
        length = min(self.next_commit, default=0)
        times: dict[int, int] = {}
        for mark in self.written[place]:
            length += mark.num_tokens
            times[length] = mark.at_ns
        return times


def median_round(rounds: Sequence[Round]) -> Round:
    """The round whose duration is the (lower) median of those with the most usual number of spans."""
    usual = statistics.mode(len(item.spans) for item in rounds)
    return sorted((item for item in rounds if len(item.spans) == usual), key=lambda item: item.duration_ns)[
        (sum(len(item.spans) == usual for item in rounds) - 1) // 2
    ]
