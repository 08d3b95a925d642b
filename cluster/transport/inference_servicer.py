"""The public gRPC API over any inference backend: plain async functions, and their binding to a grpc.aio server."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from pydantic import BeforeValidator, Field

from cluster.messages.answer import FinishReason, PolicyStamp, TokenDelta, TokenLogprobs
from cluster.messages.request import GenerateRequest, Grammar
from cluster.transport.backend import InferenceBackend
from cluster.transport.caller import Caller, check_label
from cluster.transport.generation import internal_errors, outputs
from cluster.transport.grammar_checks import GrammarChecks
from cluster.transport.grpc_errors import Context, call_metadata, ending_calls
from cluster.transport.policy_headers import policy_headers
from cluster.transport.prompts import ServedModel, served_model
from cluster.transport.structured_output import parse_grammar
from cluster.transport.validation import (
    MAX_LOGPROBS,
    Constraint,
    GenerationFields,
    InvalidCode,
    InvalidRequest,
    StrictFields,
    parse_values,
)
from protos.paceline.v1 import common_pb2, inference_pb2, inference_pb2_grpc

# --- fields ----------------------------------------------------------------------------------------------------------


class ChatTurn(StrictFields):
    role: Literal["system", "user", "assistant"]
    content: str = ""


class Chat(StrictFields):
    messages: Annotated[tuple[ChatTurn, ...], Field(min_length=1)]


class TokenIds(StrictFields):
    ids: Annotated[tuple[int, ...], Field(min_length=1)]


class GenerateFields(GenerationFields):
    """A GenerateRequest message."""

    text: str | None = None
    chat: Chat | None = None
    token_ids: TokenIds | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tenant: str | None = None
    workload: str | None = None
    user: str | None = None
    session: str | None = None
    grammar: Annotated[Grammar | None, BeforeValidator(parse_grammar)] = None

    @property
    def constraint(self) -> Constraint | None:
        return None if self.grammar is None else Constraint(self.grammar, "grammar")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class TokenizeFields(StrictFields):
    """A TokenizeRequest message."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    text: str | None = None
    chat: Chat | None = None


def message_values(message: Message) -> dict[str, object]:
    """The fields that are set, by name, as plain values."""
    return {field.name: _value(field, value) for field, value in message.ListFields()}


def _value(field: FieldDescriptor, value: Any) -> object:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    return tuple(map(_plain, value)) if field.is_repeated else _plain(value)


def _plain(value: object) -> object:
    return message_values(value) if isinstance(value, Message) else value


# --- the service -----------------------------------------------------------------------------------------------------


class InferenceServicer:
    """Owns the InferenceService's methods, free of any server: errors are raised as RequestError.

    `metadata` is the call's, with lower-case names.
    """

    def __init__(self, backend: Callable[[], InferenceBackend]) -> None:
        self._backend = backend
        self._grammars = GrammarChecks()

    async def generate(
        self, request: inference_pb2.GenerateRequest, metadata: Mapping[str, str]
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Output as it is committed. Closing the generator, or cancelling its task, cancels the request."""
        with internal_errors("Generate"):
            backend = self._backend()
            submitted = await _checked(backend, self._grammars, request, metadata)
            completion_tokens = [0] * len(submitted)
            async with aclosing(outputs(backend, submitted)) as deltas:
                async for index, delta in deltas:
                    completion_tokens[index] += len(delta.token_ids)
                    yield _response(submitted[0], index, delta, completion_tokens[index])

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, metadata: Mapping[str, str]
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a text or a conversation."""
        with internal_errors("Tokenize"):
            backend = self._backend()
            Caller.from_headers(metadata, backend.key_holder)
            fields = parse_values(TokenizeFields, message_values(request))
            model = served_model(backend, fields.model)
            token_ids, _ = await _prompt_token_ids(model, fields)
            return inference_pb2.TokenizeResponse(token_ids=token_ids)


async def _checked(
    backend: InferenceBackend,
    grammars: GrammarChecks,
    request: inference_pb2.GenerateRequest,
    metadata: Mapping[str, str],
) -> list[GenerateRequest]:
    """A request for each choice."""
    caller = Caller.from_headers(metadata, backend.key_holder)
    fields = parse_values(GenerateFields, message_values(request))
    caller = _named(caller, fields)
    model = served_model(backend, fields.model)
    await grammars.check(model.name, model.tokenizer, fields)
    token_ids, param = await _prompt_token_ids(model, fields)
    return model.choices(f"gen-{uuid.uuid4().hex}", fields, token_ids, caller, param)


def _named(caller: Caller, fields: GenerateFields) -> Caller:
    """The message's own fields go before the metadata."""
    caller = caller.with_keys(fields.user, fields.session)
    if fields.tenant is not None:
        caller = caller.of_tenant(check_label(fields.tenant, "tenant"))
    if fields.workload is not None:
        caller = replace(caller, workload=check_label(fields.workload, "workload"))
    return caller


async def _prompt_token_ids(model: ServedModel, fields: GenerateFields | TokenizeFields) -> tuple[tuple[int, ...], str]:
    """The prompt's tokens and the name of the field they came from."""
    if fields.chat is not None:
        turns = [{"role": turn.role, "content": turn.content} for turn in fields.chat.messages]
        return await model.encode_chat(turns, "chat"), "chat"
    if fields.text is not None:
        return await model.encode_prompt(fields.text, "text"), "text"
    if isinstance(fields, GenerateFields) and fields.token_ids is not None:
        return await model.encode_prompt(fields.token_ids.ids, "token_ids"), "token_ids"
    names = "text, chat or token_ids" if isinstance(fields, GenerateFields) else "text or chat"
    raise InvalidRequest(f"prompt: Missing required parameter; set {names}", "prompt", InvalidCode.MISSING)


# --- responses -------------------------------------------------------------------------------------------------------


def _response(
    first: GenerateRequest, index: int, delta: TokenDelta, completion_tokens: int
) -> inference_pb2.GenerateResponse:
    """A delta of the choice `index`; the call goes by the name of its first."""
    response = inference_pb2.GenerateResponse(
        request_id=first.request_id,
        index=index,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=[_logprobs(item) for item in delta.logprobs or ()],
    )
    if delta.finish_reason is not None:
        is_length = delta.finish_reason is FinishReason.LENGTH
        response.finish_reason = common_pb2.FINISH_REASON_LENGTH if is_length else common_pb2.FINISH_REASON_STOP
        response.usage.CopyFrom(_usage(first, delta, completion_tokens))
    return response


def _logprobs(item: TokenLogprobs) -> common_pb2.TokenLogprobs:
    top = [common_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in item.top]
    return common_pb2.TokenLogprobs(token_id=item.token_id, logprob=item.logprob, top=top)


def _usage(request: GenerateRequest, delta: TokenDelta, completion_tokens: int) -> inference_pb2.Usage:
    usage = inference_pb2.Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=completion_tokens)
    if delta.stats is not None:
        usage.cached_tokens = delta.stats.num_cached_tokens
        usage.num_steps = delta.stats.num_steps
        usage.num_draft_tokens = delta.stats.num_draft_tokens
        usage.num_accepted_tokens = delta.stats.num_accepted_tokens
        usage.acceptance_length = delta.stats.acceptance_length
    if delta.policy is not None:
        usage.policy.CopyFrom(_policy(delta.policy))
    return usage


def _policy(stamp: PolicyStamp) -> inference_pb2.PolicyDecision:
    return inference_pb2.PolicyDecision(
        version=stamp.version, variant=stamp.variant, reason=stamp.reason, rule=stamp.rule or ""
    )


def policy_metadata(response: inference_pb2.GenerateResponse) -> tuple[tuple[str, str], ...]:
    """The call's trailing metadata once this response, the last of its first choice, has been made; else nothing."""
    if response.index or not response.usage.HasField("policy"):
        return ()
    policy = response.usage.policy
    return tuple(policy_headers(PolicyStamp(policy.version, policy.variant, policy.reason)).items())


# --- the grpc.aio binding --------------------------------------------------------------------------------------------


class GrpcInferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Binds an InferenceServicer to a grpc.aio server."""

    def __init__(self, servicer: InferenceServicer) -> None:
        self._servicer = servicer

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        async with (
            ending_calls(context),
            aclosing(self._servicer.generate(request, call_metadata(context))) as responses,
        ):
            async for response in responses:
                if metadata := policy_metadata(response):
                    context.set_trailing_metadata(metadata)
                yield response

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        async with ending_calls(context):
            return await self._servicer.tokenize(request, call_metadata(context))
        raise AssertionError("the call has ended")
