"""The domain's words: frozen values that cross every boundary. Imports nothing but the standard library.

Lengths and positions count tokens from the start of the sequence, prompt included:

    | prompt tokens | output tokens ...        | draft tokens (guesses) |
    0               prompt_len                 committed_len            committed_len + K

`committed_len` is prompt + output. A message about guesses is always stamped with the committed length it was
conditioned on, so that the receiver can tell whether it still applies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

MAX_DRAFT_TOKENS = 32  # hard limit on K everywhere, so that frames and verification rows stay bounded
MAX_GRAMMAR_CHARS = 65_536  # of a grammar's source


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # EOS, a stop token id, or a stop string
    LENGTH = "length"  # max_tokens or the model's context length
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class ErrorKind(StrEnum):
    """What kind of answer a failed request gets; each kind maps to one HTTP and one gRPC status."""

    INVALID = "invalid"  # 400 INVALID_ARGUMENT
    CONTEXT_LENGTH = "context_length_exceeded"  # 400 INVALID_ARGUMENT
    UNAUTHENTICATED = "unauthenticated"  # 401 UNAUTHENTICATED
    FORBIDDEN = "forbidden"  # 403 PERMISSION_DENIED
    NOT_FOUND = "not_found"  # 404 NOT_FOUND
    CONFLICT = "conflict"  # 409 ABORTED
    OVERLOADED = "overloaded"  # 429 RESOURCE_EXHAUSTED
    UNAVAILABLE = "unavailable"  # 503 UNAVAILABLE
    DEADLINE = "deadline_exceeded"  # 504 DEADLINE_EXCEEDED
    INTERNAL = "internal"  # 500 INTERNAL


class RequestError(Exception):
    """A request that ends with an error the client must see. `param` names the offending field."""

    def __init__(
        self, kind: ErrorKind, message: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[RequestError], tuple[object, ...]]:
        """Exceptions are pickled by their args, which are not these; one crosses processes as a cause."""
        return RequestError, (self.kind, self.message, self.param, self.retry_after_s)


# --- the request -----------------------------------------------------------------------------------------------------


class GrammarKind(StrEnum):
    """What a grammar's source is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # of the whole output


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must look like, as data; ingress has seen it compile."""

    kind: GrammarKind
    source: str  # at most MAX_GRAMMAR_CHARS


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to turn a row of logits into a token; validated at ingress, so every field is in range here.

    Order of application: logits → repetition_penalty → frequency_penalty, presence_penalty and logit_bias → min_tokens
    → grammar → temperature → min_p → top_k → top_p → argmax of log-prob + keyed noise.
    temperature 0 means greedy: no noise, lowest token id wins ties.
    """

    max_tokens: int
    seed: int  # 0 ≤ seed < 2**64, always concrete: the router draws one for a seedless request
    temperature: float = 1.0
    top_p: float = 1.0  # (0, 1]
    top_k: int | None = None  # ≥ 1
    min_p: float = 0.0  # [0, 1]
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None  # None: none; 0: the chosen token's; n: also the n most likely
    presence_penalty: float = 0.0  # [-2, 2], off each token that is in the output
    frequency_penalty: float = 0.0  # [-2, 2], off each token for each time that it is in the output
    repetition_penalty: float = 1.0  # [0.01, 10], on each token that is in the prompt or the output; 1 is off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token_id, [-100, 100]), token ids distinct
    min_tokens: int = 0  # nothing but max_tokens, or a grammar that is complete, ends an output that is shorter
    grammar: Grammar | None = None  # no token is chosen that it does not allow

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits are changed at all before the temperature."""
        return self.has_penalties or bool(self.logit_bias) or self.min_tokens > 0


class Drafter(StrEnum):
    """Where guesses come from."""

    AUTO = "auto"  # the draft model if its pool is up, else n-gram
    MODEL = "model"
    NGRAM = "ngram"
    NONE = "none"


class AcceptanceRule(StrEnum):
    """How a target verifies guesses."""

    EQUAL = "equal"  # a guess is accepted if it is what the target samples itself


class DraftLengthMode(StrEnum):
    """Who decides how many guesses to ask for."""

    ADAPTIVE = "adaptive"  # measured acceptance and costs
    FIXED = "fixed"


class HoldMode(StrEnum):
    """How long a target may keep a sequence out of a step while its block is in flight."""

    BREAK_EVEN = "break_even"  # only while waiting beats decoding plainly
    DEADLINE = "deadline"  # until the longest hold: reproducible rounds, for tests and measurements
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class SpeculationOverride:
    """What one request asks of speculation; None leaves the configured default."""

    enabled: bool | None = None
    max_draft_tokens: int | None = None
    drafter: Drafter | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One validated, tokenised request, as the router keeps it."""

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = "default"
    workload: str = "default"
    user: str | None = None  # who the client says asks, and in which session: what keeps requests of one in one cohort
    session: str | None = None
    key_label: str | None = None  # of the API key, if there is one
    priority: int = 0  # lower is served first
    deadline_s: float | None = None  # seconds from arrival
    speculation: SpeculationOverride = field(default_factory=SpeculationOverride)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural log, of the unfiltered temperature-1 distribution) at one output position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token_id, logprob), most likely first


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
    """The target committed tokens at base_len; draft the next draft_len after them (0: only keep up)."""

    request_id: str
    epoch: int
    base_len: int
    token_ids: tuple[int, ...]
    draft_len: int


@dataclass(frozen=True, slots=True)
class Close:
    """Forget a draft session. Unknown ids are ignored."""

    request_id: str


DraftCommand = Open | Committed | Close
DraftEvent = DraftBlock | Refusal | PoolLoad


# --- router → client -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyStamp:
    """What part of which policy a request follows, as logs, metrics and responses name it."""

    version: int
    variant: str
    reason: str
    rule: str | None = None  # the id of the rule that decided, if one did


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What it took to make one request's output: the last delta carries it."""

    prompt_tokens: int
    completion_tokens: int
    num_steps: int = 0  # target steps that committed tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt: their KV was in the first target replica's prefix cache
    num_resumes: int = 0  # moves to another target replica
    fallbacks: tuple[str, ...] = ()  # causes, in order
    policy: PolicyStamp | None = None  # the latest decision; None before the first

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per target step, bonus included."""
        return self.completion_tokens / self.num_steps if self.num_steps else 0.0


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New output of one request. The last delta has a finish_reason and stats. `policy`: the decision in force."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    stats: GenerationStats | None = None
    policy: PolicyStamp | None = None
