"""Prompts to token ids, without holding up the event loop for long ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.core.keyed_noise import choice_seed
from cluster.messages.answer import ErrorKind, RequestError
from cluster.messages.request import GenerateRequest, SpeculationOverride
from cluster.tokenizer import Tokenizer, TokenizerError
from cluster.transport.backend import InferenceBackend
from cluster.transport.caller import Caller
from cluster.transport.validation import GenerationFields, InvalidRequest, check_against_output, output_limit

INLINE_CHARS = 4096  # encoding this much takes well under a millisecond; more is done in a thread


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that exists, with what it takes to turn prompts into requests to it."""

    name: str
    tokenizer: Tokenizer
    max_model_len: int

    async def encode_prompt(self, prompt: str | tuple[int, ...], param: str) -> tuple[int, ...]:
        """A text's tokens, or token ids as they are. Raises InvalidRequest for none, or one outside the vocabulary."""
        if isinstance(prompt, str):
            text = prompt
            prompt = await _off_loop(len(text), lambda: self.tokenizer.encode(text))
        return self._checked(prompt, param)

    async def encode_chat(self, messages: Sequence[Mapping[str, str]], param: str) -> tuple[int, ...]:
        """Raises InvalidRequest when the model's template refuses the conversation."""
        chars = sum(len(message["content"]) + 64 for message in messages)
        try:
            return await _off_loop(chars, lambda: self.tokenizer.apply_chat_template(messages))
        except TokenizerError as error:
            raise InvalidRequest(f"{param}: {error}", param) from error

    def _checked(self, token_ids: tuple[int, ...], param: str) -> tuple[int, ...]:
        if not token_ids:
            raise InvalidRequest(f"{param}: the prompt should have at least one token", param)
        limit = self.tokenizer.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= limit:
            raise InvalidRequest(f"{param}: token ids should be between 0 and {limit - 1}", param)
        return token_ids

    def request(
        self, request_id: str, fields: GenerationFields, token_ids: tuple[int, ...], caller: Caller, param: str
    ) -> GenerateRequest:
        """Raises RequestError(CONTEXT_LENGTH) when prompt and output do not fit the model, InvalidRequest otherwise."""
        max_tokens = output_limit(fields, len(token_ids), self.max_model_len, param)
        check_against_output(fields, max_tokens, self.tokenizer.vocab_size)
        return _generate_request(request_id, fields, token_ids, max_tokens, caller)

    def choices(
        self, request_id: str, fields: GenerationFields, token_ids: tuple[int, ...], caller: Caller, param: str
    ) -> list[GenerateRequest]:
        """A request for each of the prompt's n outputs, which differ in id and seed. Raises as `request` does."""
        first = self.request(request_id, fields, token_ids, caller, param)
        return [first, *(_choice(first, index) for index in range(1, fields.num_choices))]


def _choice(first: GenerateRequest, index: int) -> GenerateRequest:
    sampling = replace(first.sampling, seed=choice_seed(first.sampling.seed, index))
    return replace(first, request_id=f"{first.request_id}.{index}", sampling=sampling, choice=index)


def _generate_request(
    request_id: str, fields: GenerationFields, prompt_token_ids: tuple[int, ...], max_tokens: int, caller: Caller
) -> GenerateRequest:
    """Join what was checked into the value that the router keeps."""
    return GenerateRequest(
        request_id=request_id,
        model=fields.model,
        prompt_token_ids=prompt_token_ids,
        sampling=fields.sampling(max_tokens),
        tenant=caller.tenant,
        workload=caller.workload,
        user=caller.user,
        session=caller.session,
        key_label=caller.key_label,
        deadline_s=fields.timeout_s,
        speculation=SpeculationOverride() if fields.speculation is None else fields.speculation.override(),
    )


def served_model(backend: InferenceBackend, name: str) -> ServedModel:
    """Raises RequestError(NOT_FOUND) naming the models that are served."""
    names = backend.models()
    if name not in names:
        message = f"The model `{name}` does not exist; served models: {', '.join(names) or 'none'}"
        raise RequestError(ErrorKind.NOT_FOUND, message, "model")
    return ServedModel(name, backend.tokenizer(name), backend.max_model_len(name))


async def _off_loop(chars: int, encode: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    return encode() if chars <= INLINE_CHARS else await asyncio.to_thread(encode)
