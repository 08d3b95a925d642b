"""What a message on the wire may hold: one check per message, made before encoding and after decoding.

A pool replica trusts routers to have validated requests at ingress, but not the bytes: whatever passes these checks
cannot exhaust memory, and breaks no assumption that the engine makes about ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cluster.messages.answer import TokenLogprobs
from cluster.messages.request import MAX_DRAFT_TOKENS, MAX_GRAMMAR_CHARS, SamplingParams
from cluster.messages.rounds import (
    Abort,
    Close,
    Commit,
    Committed,
    DraftBlock,
    Open,
    PoolLoad,
    Refusal,
    SetDraftLimit,
    StepTimings,
    Submit,
)

MAX_FRAME_BYTES = 16 << 20  # also gRPC's own limit on both ends
MAX_REQUEST_ID_CHARS = 128
MAX_LABEL_CHARS = 256
MAX_COUNT = 2**31 - 1  # token ids, lengths, epochs and counters
MAX_SEQUENCE_TOKENS = 1 << 20
MAX_COMMIT_TOKENS = MAX_DRAFT_TOKENS + 1  # a full window and the bonus token
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
MAX_STOP_TOKEN_IDS = 4096
MAX_TOP_LOGPROBS = 128
MAX_LOGIT_BIASES = 4096
MAX_PENALTY = 1e6  # and biases: far beyond any range at ingress, and a logit stays finite
MAX_REFUSAL_CHARS = 1024


class CodecError(ValueError):
    """Bytes that are not a message of this protocol, or a message that the protocol cannot carry; names the field."""


def check_request_id(request_id: str) -> None:
    if not 0 < len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise CodecError(f"request_id: must have 1 to {MAX_REQUEST_ID_CHARS} characters, got {len(request_id)}")


def check_submit(message: Submit) -> None:
    check_request_id(message.request_id)
    _text("tenant", message.tenant, MAX_LABEL_CHARS)
    num_output = len(message.output_token_ids)
    _token_ids("prompt_token_ids", message.prompt_token_ids, MAX_SEQUENCE_TOKENS - num_output, at_least=1)
    _token_ids("output_token_ids", message.output_token_ids, MAX_SEQUENCE_TOKENS)
    _count("max_draft_tokens", message.max_draft_tokens, MAX_DRAFT_TOKENS)
    if message.deadline_s is not None and not math.isfinite(message.deadline_s):
        raise CodecError(f"deadline_s: must be finite, got {message.deadline_s}")
    _sampling(message.sampling)


def check_draft_block(message: DraftBlock) -> None:
    check_request_id(message.request_id)
    _count("committed_len", message.committed_len)
    _count("epoch", message.epoch)
    _token_ids("token_ids", message.token_ids, MAX_DRAFT_TOKENS)
    _seconds("draft_time_s", message.draft_time_s)


def check_draft_limit(message: SetDraftLimit) -> None:
    check_request_id(message.request_id)
    _count("max_draft_tokens", message.max_draft_tokens, MAX_DRAFT_TOKENS)


def check_named(message: Abort | Close) -> None:
    check_request_id(message.request_id)


def check_commit(message: Commit) -> None:
    check_request_id(message.request_id)
    _count("base_len", message.base_len)
    _token_ids("token_ids", message.token_ids, MAX_COMMIT_TOKENS)
    _count("next_draft_len", message.next_draft_len, MAX_DRAFT_TOKENS)
    _count("longest_draft_len", message.longest_draft_len, MAX_DRAFT_TOKENS)
    _chance("min_confidence", message.min_confidence)
    _count("num_draft_tokens", message.num_draft_tokens, MAX_DRAFT_TOKENS)
    _count("num_accepted_tokens", message.num_accepted_tokens, message.num_draft_tokens)
    _count("num_cached_tokens", message.num_cached_tokens, message.base_len)
    _timings(message.timings)
    if message.logprobs is not None:
        _logprobs(message.logprobs, len(message.token_ids))


def check_refusal(message: Refusal) -> None:
    check_request_id(message.request_id)
    _text("message", message.message, MAX_REFUSAL_CHARS)
    _count("epoch", message.epoch)


def check_load(message: PoolLoad) -> None:
    _count("num_running", message.num_running)
    _count("num_waiting", message.num_waiting)
    _count("num_total_blocks", message.num_total_blocks)
    _count("num_free_blocks", message.num_free_blocks, message.num_total_blocks)
    _count("peak_used_blocks", message.peak_used_blocks, message.num_total_blocks)


def check_open(message: Open) -> None:
    check_request_id(message.request_id)
    _text("tenant", message.tenant, MAX_LABEL_CHARS)
    _count("epoch", message.epoch)
    _token_ids("token_ids", message.token_ids, MAX_SEQUENCE_TOKENS, at_least=1)
    _count("draft_len", message.draft_len, MAX_DRAFT_TOKENS)
    _count("num_prompt_tokens", message.num_prompt_tokens, len(message.token_ids))
    _sampling(message.sampling)


def check_committed(message: Committed) -> None:
    check_request_id(message.request_id)
    _count("epoch", message.epoch)
    _count("base_len", message.base_len)
    _token_ids("token_ids", message.token_ids, MAX_SEQUENCE_TOKENS)
    _count("draft_len", message.draft_len, MAX_DRAFT_TOKENS)
    _count("longest_draft_len", message.longest_draft_len, MAX_DRAFT_TOKENS)
    _chance("min_confidence", message.min_confidence)


def _sampling(params: SamplingParams) -> None:
    _count("sampling.max_tokens", params.max_tokens, at_least=1)
    _count("sampling.seed", params.seed, 2**64 - 1)
    _range("sampling.temperature", params.temperature, lambda value: 0 <= value < math.inf)
    _range("sampling.top_p", params.top_p, lambda value: 0 < value <= 1)
    _range("sampling.min_p", params.min_p, lambda value: 0 <= value <= 1)
    if params.top_k is not None:
        _count("sampling.top_k", params.top_k, at_least=1)
    if params.num_logprobs is not None:
        _count("sampling.num_logprobs", params.num_logprobs, MAX_TOP_LOGPROBS)
    _count("sampling.stop", len(params.stop), MAX_STOP_STRINGS)
    for text in params.stop:
        _text("sampling.stop", text, MAX_STOP_CHARS)
    _token_ids("sampling.stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS)
    _adjustments(params)


def _adjustments(params: SamplingParams) -> None:
    _range("sampling.presence_penalty", params.presence_penalty, lambda value: abs(value) <= MAX_PENALTY)
    _range("sampling.frequency_penalty", params.frequency_penalty, lambda value: abs(value) <= MAX_PENALTY)
    _range("sampling.repetition_penalty", params.repetition_penalty, _is_factor)
    token_ids = [token_id for token_id, _ in params.logit_bias]
    _token_ids("sampling.logit_bias", token_ids, MAX_LOGIT_BIASES)
    if len(set(token_ids)) < len(token_ids):
        raise CodecError("sampling.logit_bias: has a token id twice")
    for _, bias in params.logit_bias:
        _range("sampling.logit_bias", bias, lambda value: abs(value) <= MAX_PENALTY)
    _count("sampling.min_tokens", params.min_tokens)
    if params.grammar is not None:
        _text("sampling.grammar", params.grammar.source, MAX_GRAMMAR_CHARS)


def _is_factor(value: float) -> bool:
    return 1 / MAX_PENALTY <= value <= MAX_PENALTY


def _logprobs(logprobs: Sequence[TokenLogprobs], num_tokens: int) -> None:
    if len(logprobs) != num_tokens:
        raise CodecError(f"logprobs: must be one per token, got {len(logprobs)} for {num_tokens}")
    for entry in logprobs:
        _count("logprobs.top", len(entry.top), MAX_TOP_LOGPROBS)
        pairs = ((entry.token_id, entry.logprob), *entry.top)
        _token_ids("logprobs.token_id", [token_id for token_id, _ in pairs], len(pairs))
        if any(math.isnan(logprob) for _, logprob in pairs):
            raise CodecError("logprobs.logprob: is not a number")


def _timings(timings: StepTimings) -> None:
    _seconds("timings.queue_s", timings.queue_s)
    _seconds("timings.step_s", timings.step_s)
    _seconds("timings.held_s", timings.held_s)
    _seconds("timings.round_trip_s", timings.round_trip_s)
    _seconds("timings.draft_time_s", timings.draft_time_s)


def _token_ids(field: str, token_ids: Sequence[int], at_most: int, at_least: int = 0) -> None:
    if not at_least <= len(token_ids) <= at_most:
        raise CodecError(f"{field}: must hold {at_least} to {at_most} tokens, got {len(token_ids)}")
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) <= MAX_COUNT):
        raise CodecError(f"{field}: token ids must lie in 0..{MAX_COUNT}")


def _count(field: str, value: int, at_most: int = MAX_COUNT, at_least: int = 0) -> None:
    if not at_least <= value <= at_most:
        raise CodecError(f"{field}: must lie in {at_least}..{at_most}, got {value}")


def _seconds(field: str, value: float) -> None:
    _range(field, value, lambda seconds: 0 <= seconds < math.inf)


def _chance(field: str, value: float) -> None:
    _range(field, value, lambda chance: 0 <= chance <= 1)


def _range(field: str, value: float, holds: Callable[[float], bool]) -> None:
    if not holds(value):
        raise CodecError(f"{field}: out of range, got {value}")


def _text(field: str, value: str, at_most: int) -> None:
    if len(value) > at_most:
        raise CodecError(f"{field}: must have at most {at_most} characters, got {len(value)}")
