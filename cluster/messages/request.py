"""What a client asks for, validated: how to sample, how to speculate, for whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

MAX_DRAFT_TOKENS = 32  # hard limit on K everywhere, so that frames and verification rows stay bounded
MAX_GRAMMAR_CHARS = 65_536  # of a grammar's source


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
    choice: int = 0  # which of the outputs of one prompt; the prompt counts once against a quota
    speculation: SpeculationOverride = field(default_factory=SpeculationOverride)
