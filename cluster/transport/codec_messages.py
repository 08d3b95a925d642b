"""Each message and its protobuf twin: `put_*` writes one, `get_*` reads one; both check its limits.

Every function here raises CodecError naming the field at fault; a value that protobuf itself refuses (an integer out of
its type's range, text that is not Unicode) surfaces as ValueError or TypeError from `put_*`.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.messages.answer import FinishReason, TokenLogprobs
from cluster.messages.request import Grammar, GrammarKind, SamplingParams
from cluster.messages.rounds import (
    Abort,
    Close,
    Commit,
    Committed,
    DraftBlock,
    Open,
    PoolLoad,
    Refusal,
    RefusalReason,
    SetDraftLimit,
    StepTimings,
    Submit,
)
from cluster.transport import limits
from cluster.transport.limits import CodecError
from protos.paceline.v1 import common_pb2, draft_pb2, target_pb2

_FINISH = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: common_pb2.FINISH_REASON_DEADLINE,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}
_REFUSAL = {
    RefusalReason.QUEUE_FULL: common_pb2.REFUSAL_REASON_QUEUE_FULL,
    RefusalReason.DRAINING: common_pb2.REFUSAL_REASON_DRAINING,
    RefusalReason.TOO_LONG: common_pb2.REFUSAL_REASON_TOO_LONG,
    RefusalReason.UNSUPPORTED: common_pb2.REFUSAL_REASON_UNSUPPORTED,
    RefusalReason.INTERNAL: common_pb2.REFUSAL_REASON_INTERNAL,
}
_GRAMMAR = {
    GrammarKind.JSON_SCHEMA: common_pb2.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.REGEX: common_pb2.GRAMMAR_KIND_REGEX,
}
_GRAMMAR_OF = {int(number): kind for kind, number in _GRAMMAR.items()}
_FINISH_OF = {int(number): reason for reason, number in _FINISH.items()}
_REFUSAL_OF = {int(number): reason for reason, number in _REFUSAL.items()}


def put_sampling(params: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        max_tokens=params.max_tokens,
        seed=params.seed,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        num_logprobs=params.num_logprobs,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=None if params.repetition_penalty == 1 else params.repetition_penalty,
        logit_bias=[common_pb2.TokenBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias],
        min_tokens=params.min_tokens,
        grammar=None if params.grammar is None else _put_grammar(params.grammar),
    )


def _put_grammar(grammar: Grammar) -> common_pb2.Grammar:
    return common_pb2.Grammar(kind=_GRAMMAR[grammar.kind], source=grammar.source)


def get_sampling(body: common_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=body.max_tokens,
        seed=body.seed,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k if body.HasField("top_k") else None,
        min_p=body.min_p,
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        num_logprobs=body.num_logprobs if body.HasField("num_logprobs") else None,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty if body.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in body.logit_bias),
        min_tokens=body.min_tokens,
        grammar=_get_grammar(body.grammar) if body.HasField("grammar") else None,
    )


def _get_grammar(body: common_pb2.Grammar) -> Grammar:
    if body.kind not in _GRAMMAR_OF:
        raise CodecError(f"sampling.grammar: no kind {body.kind}")
    return Grammar(_GRAMMAR_OF[body.kind], body.source)


def put_submit(message: Submit) -> target_pb2.Submit:
    limits.check_submit(message)
    return target_pb2.Submit(
        request_id=message.request_id,
        prompt_token_ids=message.prompt_token_ids,
        sampling=put_sampling(message.sampling),
        max_draft_tokens=message.max_draft_tokens,
        output_token_ids=message.output_token_ids,
        priority=message.priority,
        deadline_s=message.deadline_s,
        tenant=message.tenant,
    )


def get_submit(body: target_pb2.Submit) -> Submit:
    message = Submit(
        request_id=body.request_id,
        prompt_token_ids=tuple(body.prompt_token_ids),
        sampling=get_sampling(body.sampling),
        max_draft_tokens=body.max_draft_tokens,
        output_token_ids=tuple(body.output_token_ids),
        priority=body.priority,
        deadline_s=body.deadline_s if body.HasField("deadline_s") else None,
        tenant=body.tenant,
    )
    limits.check_submit(message)
    return message


def put_draft_block(message: DraftBlock) -> common_pb2.DraftBlock:
    limits.check_draft_block(message)
    return common_pb2.DraftBlock(
        request_id=message.request_id,
        committed_len=message.committed_len,
        token_ids=message.token_ids,
        epoch=message.epoch,
        draft_time_s=message.draft_time_s,
    )


def get_draft_block(body: common_pb2.DraftBlock) -> DraftBlock:
    message = DraftBlock(
        body.request_id, body.committed_len, tuple(body.token_ids), body.epoch, draft_time_s=body.draft_time_s
    )
    limits.check_draft_block(message)
    return message


def put_draft_limit(message: SetDraftLimit) -> target_pb2.SetDraftLimit:
    limits.check_draft_limit(message)
    return target_pb2.SetDraftLimit(request_id=message.request_id, max_draft_tokens=message.max_draft_tokens)


def get_draft_limit(body: target_pb2.SetDraftLimit) -> SetDraftLimit:
    message = SetDraftLimit(body.request_id, body.max_draft_tokens)
    limits.check_draft_limit(message)
    return message


def put_commit(message: Commit) -> target_pb2.Commit:
    limits.check_commit(message)
    timings = message.timings
    return target_pb2.Commit(
        request_id=message.request_id,
        base_len=message.base_len,
        token_ids=message.token_ids,
        next_draft_len=message.next_draft_len,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        finish_reason=None if message.finish_reason is None else _FINISH[message.finish_reason],
        logprobs=[_put_logprobs(entry) for entry in message.logprobs or ()],
        timings=target_pb2.StepTimings(
            queue_s=timings.queue_s,
            step_s=timings.step_s,
            held_s=timings.held_s,
            round_trip_s=timings.round_trip_s,
            draft_time_s=timings.draft_time_s,
        ),
        num_cached_tokens=message.num_cached_tokens,
        longest_draft_len=message.longest_draft_len,
        min_confidence=message.min_confidence,
    )


def get_commit(body: target_pb2.Commit) -> Commit:
    message = Commit(
        request_id=body.request_id,
        base_len=body.base_len,
        token_ids=tuple(body.token_ids),
        next_draft_len=body.next_draft_len,
        num_draft_tokens=body.num_draft_tokens,
        num_accepted_tokens=body.num_accepted_tokens,
        finish_reason=_get_finish_reason(body.finish_reason),
        logprobs=tuple(_get_logprobs(entry) for entry in body.logprobs) or None,
        timings=_get_timings(body.timings),
        num_cached_tokens=body.num_cached_tokens,
        longest_draft_len=body.longest_draft_len,
        min_confidence=body.min_confidence,
    )
    limits.check_commit(message)
    return message


def _get_timings(body: target_pb2.StepTimings) -> StepTimings:
    return StepTimings(body.queue_s, body.step_s, body.held_s, body.round_trip_s, body.draft_time_s)


def _get_finish_reason(number: int) -> FinishReason | None:
    if number == common_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    if number not in _FINISH_OF:
        raise CodecError(f"finish_reason: unknown value {number}")
    return _FINISH_OF[number]


def _put_logprobs(entry: TokenLogprobs) -> common_pb2.TokenLogprobs:
    top = [common_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top]
    return common_pb2.TokenLogprobs(token_id=entry.token_id, logprob=entry.logprob, top=top)


def _get_logprobs(body: common_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(body.token_id, body.logprob, tuple((top.token_id, top.logprob) for top in body.top))


def put_refusal(message: Refusal) -> common_pb2.Refusal:
    message = replace(message, message=message.message[: limits.MAX_REFUSAL_CHARS])  # often an exception's text
    limits.check_refusal(message)
    return common_pb2.Refusal(
        request_id=message.request_id,
        reason=_REFUSAL[message.reason],
        message=message.message,
        epoch=message.epoch,
    )


def get_refusal(body: common_pb2.Refusal) -> Refusal:
    if body.reason not in _REFUSAL_OF:
        raise CodecError(f"reason: unknown value {body.reason}")
    message = Refusal(body.request_id, _REFUSAL_OF[body.reason], body.message, body.epoch)
    limits.check_refusal(message)
    return message


def put_load(message: PoolLoad) -> common_pb2.PoolLoad:
    limits.check_load(message)
    return common_pb2.PoolLoad(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_free_blocks=message.num_free_blocks,
        num_total_blocks=message.num_total_blocks,
        peak_used_blocks=message.peak_used_blocks,
        draining=message.draining,
    )


def get_load(body: common_pb2.PoolLoad) -> PoolLoad:
    message = PoolLoad(
        num_running=body.num_running,
        num_waiting=body.num_waiting,
        num_free_blocks=body.num_free_blocks,
        num_total_blocks=body.num_total_blocks,
        peak_used_blocks=body.peak_used_blocks,
        draining=body.draining,
    )
    limits.check_load(message)
    return message


def put_open(message: Open) -> draft_pb2.Open:
    limits.check_open(message)
    return draft_pb2.Open(
        request_id=message.request_id,
        epoch=message.epoch,
        token_ids=message.token_ids,
        sampling=put_sampling(message.sampling),
        draft_len=message.draft_len,
        tenant=message.tenant,
        num_prompt_tokens=message.num_prompt_tokens,
    )


def get_open(body: draft_pb2.Open) -> Open:
    message = Open(
        request_id=body.request_id,
        epoch=body.epoch,
        token_ids=tuple(body.token_ids),
        sampling=get_sampling(body.sampling),
        draft_len=body.draft_len,
        tenant=body.tenant,
        num_prompt_tokens=body.num_prompt_tokens,
    )
    limits.check_open(message)
    return message


def put_committed(message: Committed) -> draft_pb2.Committed:
    limits.check_committed(message)
    return draft_pb2.Committed(
        request_id=message.request_id,
        epoch=message.epoch,
        base_len=message.base_len,
        token_ids=message.token_ids,
        draft_len=message.draft_len,
        min_confidence=message.min_confidence,
        longest_draft_len=message.longest_draft_len,
    )


def get_committed(body: draft_pb2.Committed) -> Committed:
    message = Committed(
        body.request_id,
        body.epoch,
        body.base_len,
        tuple(body.token_ids),
        body.draft_len,
        body.min_confidence,
        body.longest_draft_len,
    )
    limits.check_committed(message)
    return message


def put_abort(message: Abort) -> target_pb2.Abort:
    limits.check_named(message)
    return target_pb2.Abort(request_id=message.request_id)


def get_abort(body: target_pb2.Abort) -> Abort:
    message = Abort(body.request_id)
    limits.check_named(message)
    return message


def put_close(message: Close) -> draft_pb2.Close:
    limits.check_named(message)
    return draft_pb2.Close(request_id=message.request_id)


def get_close(body: draft_pb2.Close) -> Close:
    message = Close(body.request_id)
    limits.check_named(message)
    return message
