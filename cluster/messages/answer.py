"""What a client gets: new output with its log-probabilities, statistics at the end, or an error."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural log, of the unfiltered temperature-1 distribution) at one output position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token_id, logprob), most likely first


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
