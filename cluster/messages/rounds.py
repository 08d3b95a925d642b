"""What a router and the replicas of a pool say to each other, round after round.

Lengths and positions count tokens from the start of the sequence, prompt included:

    | prompt tokens | output tokens ...        | draft tokens (guesses) |
    0               prompt_len                 committed_len            committed_len + K

`committed_len` is prompt + output. A message about guesses is always stamped with the committed length it was
conditioned on, so that the receiver can tell whether it still applies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.messages.answer import FinishReason, TokenLogprobs
from cluster.messages.request import SamplingParams

# --- router → target -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """Start (or resume) a request on a target replica.

    `output_token_ids` holds tokens already committed elsewhere: a router moving a live stream resubmits them, and they
    count against max_tokens. `max_draft_tokens` bounds the guesses asked for, until a SetDraftLimit changes it.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_draft_tokens: int = 0
    output_token_ids: tuple[int, ...] = ()
    priority: int = 0
    deadline_s: float | None = None
    tenant: str = "default"  # fairness and cache salt only; pools know no policy


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """Guesses for positions committed_len, committed_len + 1, …; router → target it is the proposal.

    No tokens means "no guess will come for this committed_len": a target that holds the sequence stops waiting.
    `epoch` counts the draft sessions of a request; blocks of an earlier one are stale.
    """

    request_id: str
    committed_len: int
    token_ids: tuple[int, ...]
    epoch: int = 0
    draft_time_s: float = 0.0  # time the draft replica spent on it, queueing there included


@dataclass(frozen=True, slots=True)
class SetDraftLimit:
    """Ask for at most so many guesses from now on. 0: ask for none and wait for none, which costs nothing."""

    request_id: str
    max_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget a request and free what it holds. Unknown or finished ids are ignored."""

    request_id: str


TargetCommand = Submit | DraftBlock | SetDraftLimit | Abort


# --- target → router -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where the time of one committed step went, in seconds."""

    queue_s: float = 0.0  # submit → first scheduled, on the first commit only
    step_s: float = 0.0  # the engine step that made this commit
    held_s: float = 0.0  # how long the sequence was held for a block before it
    round_trip_s: float = 0.0  # a commit → the block that it asked for, if one came before this commit; else 0
    draft_time_s: float = 0.0  # the part of it inside the draft replica; the rest is what the round itself costs


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that are now part of the sequence: positions base_len … base_len + len(token_ids).

    next_draft_len: how many guesses the target would verify next (0: none wanted).
    longest_draft_len, min_confidence: a drafter that knows the chance of its guesses may make more of them, at most so
    many, and ends once the chance that all are right is below min_confidence. 0: it makes next_draft_len, too.
    num_draft_tokens / num_accepted_tokens: what this step verified and accepted.
    A commit with a finish_reason is the last one; it may carry no tokens (abort, deadline).
    """

    request_id: str
    base_len: int
    token_ids: tuple[int, ...]
    next_draft_len: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    timings: StepTimings = field(default_factory=StepTimings)
    num_cached_tokens: int = 0  # of the prompt, whose KV was there; on the first commit of a request only
    longest_draft_len: int = 0
    min_confidence: float = 0.0


class RefusalReason(StrEnum):
    """Why a pool replica would not take or keep a request."""

    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    TOO_LONG = "too_long"  # does not fit the model's context or the whole KV pool
    UNSUPPORTED = "unsupported"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A pool replica dropped the request; it holds nothing for it any more."""

    request_id: str
    reason: RefusalReason
    message: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """A replica's occupancy, sent when it changes (at most a few times a second)."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_total_blocks: int
    peak_used_blocks: int
    draining: bool = False


TargetEvent = Commit | Refusal | PoolLoad


# --- router ↔ draft --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """Start a draft session on everything committed so far; draft_len 0 only prefills."""

    request_id: str
    epoch: int
    token_ids: tuple[int, ...]  # prompt + output committed so far
    sampling: SamplingParams
    draft_len: int = 0
    tenant: str = "default"
    num_prompt_tokens: int = 0  # how many of token_ids are the prompt; the rest is output, which penalties count


@dataclass(frozen=True, slots=True)
class Committed:
    """The target committed tokens at base_len; draft the next draft_len after them (0: only keep up).

    With min_confidence a block has up to longest_draft_len guesses, and ends once the chance that all are right is
    below it. A drafter that does not know these two fields makes draft_len.
    """

    request_id: str
    epoch: int
    base_len: int
    token_ids: tuple[int, ...]
    draft_len: int
    min_confidence: float = 0.0
    longest_draft_len: int = 0


@dataclass(frozen=True, slots=True)
class Close:
    """Forget a draft session. Unknown ids are ignored."""

    request_id: str


DraftCommand = Open | Committed | Close
DraftEvent = DraftBlock | Refusal | PoolLoad
