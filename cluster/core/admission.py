"""Which requests a target replica takes at all."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.draft_length import DraftLengthState
from cluster.core.grammar import GrammarGuide, TokenMatcher
from cluster.core.kv_cache import KVCacheManager
from cluster.core.logit_history import logit_history
from cluster.core.sequence import Sequence
from cluster.messages.request import HoldMode
from cluster.messages.rounds import Refusal, RefusalReason, Submit


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one target replica."""

    max_num_seqs: int
    max_num_batched_tokens: int  # rows of one step: prefill, decode, and verification
    max_model_len: int
    max_queued: int  # waiting beyond max_num_seqs
    vocab_size: int  # prompts and guesses outside it are refused
    eos_token_ids: frozenset[int] = frozenset()
    hold: HoldMode = HoldMode.BREAK_EVEN
    max_hold_s: float = 0.05
    prefill_stretch: float = 2.0  # how much longer than without prompts a step of running streams may be, about

    @property
    def max_running(self) -> int:
        """Every running sequence gets at least one row per step, so there are never more of them than rows."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


def max_num_tokens(submit: Submit, config: SchedulerConfig) -> int:
    """How long the sequence may become, prompt included."""
    return min(len(submit.prompt_token_ids) + submit.sampling.max_tokens, config.max_model_len)


def make_sequence(
    submit: Submit, config: SchedulerConfig, arrival: int, now: float, matcher: TokenMatcher | None = None
) -> Sequence:
    """The sequence of a request that has not been refused; `arrival` numbers requests in order. Raises GrammarError."""
    sampling = submit.sampling
    eos = frozenset[int]() if sampling.ignore_eos and sampling.grammar is None else config.eos_token_ids
    stop_token_ids = eos.union(sampling.stop_token_ids)
    return Sequence(
        request=submit,
        order=(submit.priority, arrival),
        arrived_at=now,
        max_num_tokens=max_num_tokens(submit, config),
        stop_token_ids=stop_token_ids,
        draft_length=DraftLengthState(submit.max_draft_tokens),
        token_ids=list(submit.prompt_token_ids + submit.output_token_ids),
        history=logit_history(sampling, submit.prompt_token_ids, submit.output_token_ids, stop_token_ids),
        guide=None if matcher is None else GrammarGuide(matcher, config.eos_token_ids, submit.output_token_ids),
    )


def refuse(submit: Submit, config: SchedulerConfig, kv: KVCacheManager) -> Refusal | None:
    """Why a request can never run here, or None."""
    token_ids = submit.prompt_token_ids + submit.output_token_ids
    limit = max_num_tokens(submit, config)
    if not submit.prompt_token_ids:
        return _refusal(submit, RefusalReason.UNSUPPORTED, "the prompt has no tokens")
    if min(token_ids) < 0 or max(token_ids) >= config.vocab_size:
        return _refusal(submit, RefusalReason.UNSUPPORTED, f"token ids must be in [0, {config.vocab_size})")
    if len(token_ids) >= config.max_model_len:
        message = f"{len(token_ids)} tokens leave no room to generate in a context of {config.max_model_len}"
        return _refusal(submit, RefusalReason.TOO_LONG, message)
    if len(token_ids) >= limit:
        return _refusal(submit, RefusalReason.UNSUPPORTED, "max_tokens leaves nothing to generate")
    num_blocks = kv.num_blocks_for(limit - 1)  # the last token is never computed
    if num_blocks > kv.pool.num_blocks:
        message = f"{limit} tokens need {num_blocks} KV blocks, the pool has {kv.pool.num_blocks}"
        return _refusal(submit, RefusalReason.TOO_LONG, message)
    return None


def refuse_duplicate(submit: Submit) -> Refusal:
    return _refusal(submit, RefusalReason.INTERNAL, "the request_id is in use")


def refuse_overload(submit: Submit, num_queued: int) -> Refusal:
    return _refusal(submit, RefusalReason.QUEUE_FULL, f"{num_queued} requests are waiting")


def _refusal(submit: Submit, reason: RefusalReason, message: str) -> Refusal:
    return Refusal(submit.request_id, reason, message)
