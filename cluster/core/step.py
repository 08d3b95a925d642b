"""What goes into one engine step and what comes out: the only values the scheduler and a model runner share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from cluster.messages.answer import TokenLogprobs
from cluster.messages.request import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingHistory:
    """What a sequence's samples depend on beside their own logits: the state of penalties, logit_bias and min_tokens.

    Arrays are packed: bytes are immutable, cost one copy, and are read without another.

        slot        | tokens with a bias or that stop | tokens of the prompt | tokens of the output | new ones ahead |
        token_ids   distinct
        counts      times in the output; 0: only in the prompt; NOT_SEEN: in neither
        bias        of the first slots

    `num_ahead` tokens follow those that are counted: guesses. The j-th of n samples comes after the first
    num_ahead - (n - 1) + j of them, and they count for it as if they had been emitted.
    """

    NOT_SEEN: ClassVar[int] = -1

    token_ids: bytes  # int32 [E]
    counts: bytes  # int32 [E]
    bias: bytes  # float64 [at most E]
    stop_slots: tuple[int, ...]  # of the tokens that min_tokens suppresses
    num_output_tokens: int  # tokens of the output that are counted
    num_ahead: int
    ahead_slots: tuple[int, ...] = ()  # in order; empty when nothing depends on counts


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's rows in a step: a contiguous run of tokens starting at `start`.

        positions   start ............................................ start + len(token_ids)
        tokens      | prompt chunk, or the last committed token | draft tokens (num_draft_tokens) |
        samples                                  the last num_samples positions each sample their next token

    num_samples is 0 for a prefill chunk that is not the prompt's last, else num_draft_tokens + 1.
    The j-th sample (0-based) is the token at absolute position start + len(token_ids) - num_samples + j + 1.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]  # physical block of each logical block, covering all rows' slots, chained ones too
    num_samples: int
    sampling: SamplingParams
    num_draft_tokens: int = 0
    history: SamplingHistory | None = None  # None: penalties, biases and min_tokens change nothing
    token_masks: bytes | None = None  # a TokenMask's bits for each sample, end to end; None: every token is allowed
    min_logprob: float = -math.inf  # ends a chain when its samples together fall below; needs sampling.num_logprobs


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work. `wake_at` is when a held sequence must run even without its block (None: nothing held).

    With `num_chained`, so many passes follow the first one, each with a row for every sequence that samples: it holds
    the token sampled last, at the next position, and samples the one after it. Such a step's sequences have one sample
    at most, and no history or masks. A fault ends the chain, and so does work that waits, and a sequence whose tokens
    together have become too unlikely.
    """

    scheduled: tuple[ScheduledSequence, ...] = ()
    wake_at: float | None = None
    num_chained: int = 0

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A model's own tokens at a sequence's sampled positions, in order: num_samples of them, and those of a chain."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of each, if asked for


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a model runner returns: samples for every scheduled sequence with num_samples > 0, by request_id.

    A sequence whose logits cannot be sampled (NaN, +inf) has no samples; `failed` says why, and only it must end. One
    of `stuck` has none because the model scores no token that its mask allows.
    """

    samples: Mapping[str, SampledTokens] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    stuck: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """What a replica's prefix cache holds now, and what came of it since it was made."""

    num_blocks: int = 0  # in use or idle
    num_query_tokens: int = 0  # of sequences when they were admitted, once per admission
    num_hit_tokens: int = 0  # of those, tokens whose KV was there


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A scheduler's occupancy at one moment, and its counters since it was made."""

    num_running: int
    num_waiting: int  # preempted sequences wait too
    num_used_blocks: int
    num_total_blocks: int
    peak_used_blocks: int
    num_preemptions: int = 0
    num_stale_blocks: int = 0  # draft blocks whose stamp or shape no longer fitted
    holds: Mapping[str, int] = field(default_factory=dict)  # by outcome: arrived, declined, expired, not_worth
    tactics: Mapping[str, int] = field(default_factory=dict)  # steps by tactic, where there is a choice
    prefix_cache: PrefixCacheStats = PrefixCacheStats()

    @property
    def num_free_blocks(self) -> int:
        return self.num_total_blocks - self.num_used_blocks


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one engine step did and how long it took."""

    duration_s: float
    num_sequences: int
    num_scheduled_tokens: int  # rows: prefill, decode, and verification
    num_draft_tokens: int
    num_accepted_tokens: int
    num_emitted_tokens: int
    num_verified_sequences: int  # sequences that had draft tokens in this step
    accepted_per_position: tuple[int, ...]  # [i]: verifications that accepted draft position i
    scheduler: SchedulerStats
    num_passes: int = 1  # through the model: more in a chain
