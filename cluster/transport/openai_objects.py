"""Response objects of the OpenAI-compatible API, built from the `openai` package's own types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import Choice as ChatChoice
from openai.types.chat.chat_completion import ChoiceLogprobs as ChatLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel

from cluster.messages.answer import FinishReason, PolicyStamp, TokenDelta, TokenLogprobs
from cluster.tokenizer import IncrementalDetokenizer, Tokenizer

MIN_LOGPROB = -9999.0  # what OpenAI's API reports for impossible tokens; JSON has no infinity


@dataclass(slots=True)
class ChoiceOutput:
    """Owns one choice's output while it is collected."""

    text: str = ""
    num_tokens: int = 0
    num_cached_tokens: int = 0  # of its prompt; known at its end
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    policy: PolicyStamp | None = None  # the first decision

    def add(self, delta: TokenDelta) -> None:
        self.policy = self.policy or delta.policy
        self.text += delta.text
        self.num_tokens += len(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        self.finish_reason = delta.finish_reason
        if delta.stats is not None:
            self.num_cached_tokens = delta.stats.num_cached_tokens


@dataclass(frozen=True, slots=True)
class Identity:
    """What every object of one answer repeats."""

    id: str
    created: int  # Unix time in seconds
    model: str
    with_logprobs: bool = False


class Answer(Protocol):
    """How one endpoint words its output."""

    identity: Identity

    def chunks(self, index: int, delta: TokenDelta) -> Iterable[BaseModel]:
        """The chunks that a stream sends for a delta of the choice `index`, in order."""
        ...

    def usage_chunk(self, usage: CompletionUsage) -> BaseModel:
        """The last chunk, which has no choices."""
        ...

    def whole(self, choices: Sequence[ChoiceOutput], usage: CompletionUsage) -> BaseModel:
        """The answer that is no stream."""
        ...


def to_json(item: BaseModel) -> bytes:
    """Only what was set; `warnings` is off because chunks of completions have a finish reason of null."""
    return item.model_dump_json(exclude_unset=True, warnings=False).encode()


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> CompletionUsage:
    return CompletionUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


def _finish(reason: FinishReason | None) -> Literal["stop", "length"]:
    return "length" if reason is FinishReason.LENGTH else "stop"


# --- chat ------------------------------------------------------------------------------------------------------------


class ChatAnswer:
    """Owns the wording of one chat completion, and which choices' role chunks have gone out."""

    def __init__(self, identity: Identity, tokenizer: Tokenizer) -> None:
        self.identity = identity
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def chunks(self, index: int, delta: TokenDelta) -> Iterable[BaseModel]:
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(index, ChoiceDelta(role="assistant", content="", refusal=None))
        if delta.text or delta.logprobs:
            logprobs = ChunkLogprobs(content=self._logprobs(delta.logprobs), refusal=None) if delta.logprobs else None
            yield self._chunk(index, ChoiceDelta(content=delta.text), logprobs)
        if delta.finish_reason is not None:
            yield self._chunk(index, ChoiceDelta(), None, _finish(delta.finish_reason))

    def usage_chunk(self, usage: CompletionUsage) -> BaseModel:
        return ChatCompletionChunk(
            id=self.identity.id,
            object="chat.completion.chunk",
            created=self.identity.created,
            model=self.identity.model,
            choices=[],
            usage=usage,
        )

    def whole(self, choices: Sequence[ChoiceOutput], usage: CompletionUsage) -> BaseModel:
        return ChatCompletion(
            id=self.identity.id,
            object="chat.completion",
            created=self.identity.created,
            model=self.identity.model,
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=usage,
        )

    def _choice(self, index: int, choice: ChoiceOutput) -> ChatChoice:
        content = self._logprobs(choice.logprobs)
        return ChatChoice(
            index=index,
            message=ChatCompletionMessage(role="assistant", content=choice.text, refusal=None),
            logprobs=ChatLogprobs(content=content, refusal=None) if self.identity.with_logprobs else None,
            finish_reason=_finish(choice.finish_reason),
        )

    def _chunk(
        self,
        index: int,
        delta: ChoiceDelta,
        logprobs: ChunkLogprobs | None = None,
        finish_reason: Literal["stop", "length"] | None = None,
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.identity.id,
            object="chat.completion.chunk",
            created=self.identity.created,
            model=self.identity.model,
            choices=[ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)],
            usage=None,
        )

    def _logprobs(self, items: Iterable[TokenLogprobs]) -> list[ChatCompletionTokenLogprob]:
        return [
            ChatCompletionTokenLogprob(
                token=token.token,
                bytes=token.bytes,
                logprob=token.logprob,
                top_logprobs=[self._token(token_id, logprob) for token_id, logprob in item.top],
            )
            for item in items
            for token in (self._token(item.token_id, item.logprob),)
        ]

    def _token(self, token_id: int, logprob: float) -> TopLogprob:
        data = self._tokenizer.token_bytes(token_id)
        text = data.decode("utf-8", "replace")
        return TopLogprob(token=text, bytes=list(data), logprob=max(logprob, MIN_LOGPROB))


# --- completions -----------------------------------------------------------------------------------------------------


class CompletionAnswer:
    """Owns the wording of one completions answer, and how far each choice's text has come.

    `echoes`: what goes before each choice's text.
    """

    def __init__(self, identity: Identity, tokenizer: Tokenizer, echoes: Sequence[str]) -> None:
        self.identity = identity
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._unsent = dict(enumerate(echoes))
        self._offsets = [_TextOffsets(tokenizer) for _ in echoes]

    def chunks(self, index: int, delta: TokenDelta) -> Iterable[BaseModel]:
        if echo := self._unsent.pop(index, ""):
            yield self._object([_completion_choice(index, echo, None, None)], None)
        if delta.text or delta.logprobs:
            logprobs = self._logprobs(index, delta.logprobs) if delta.logprobs else None
            yield self._object([_completion_choice(index, delta.text, logprobs, None)], None)
        if delta.finish_reason is not None:
            yield self._object([_completion_choice(index, "", None, _finish(delta.finish_reason))], None)

    def usage_chunk(self, usage: CompletionUsage) -> BaseModel:
        return self._object([], usage)

    def whole(self, choices: Sequence[ChoiceOutput], usage: CompletionUsage) -> BaseModel:
        return self._object([self._choice(index, choice) for index, choice in enumerate(choices)], usage)

    def _choice(self, index: int, choice: ChoiceOutput) -> CompletionChoice:
        logprobs = self._logprobs(index, choice.logprobs) if self.identity.with_logprobs else None
        return _completion_choice(index, self._echoes[index] + choice.text, logprobs, _finish(choice.finish_reason))

    def _object(self, choices: list[CompletionChoice], usage: CompletionUsage | None) -> Completion:
        return Completion(
            id=self.identity.id,
            object="text_completion",
            created=self.identity.created,
            model=self.identity.model,
            choices=choices,
            usage=usage,
        )

    def _logprobs(self, index: int, items: Sequence[TokenLogprobs]) -> Logprobs:
        return Logprobs(
            tokens=[self._token_text(item.token_id) for item in items],
            token_logprobs=[max(item.logprob, MIN_LOGPROB) for item in items],
            top_logprobs=[self._top(item) for item in items],
            text_offset=[self._offsets[index].advance(item.token_id) for item in items],
        )

    def _top(self, item: TokenLogprobs) -> dict[str, float]:
        ranked = dict(((item.token_id, item.logprob), *item.top)) if item.top else {}
        return {self._token_text(token_id): max(logprob, MIN_LOGPROB) for token_id, logprob in ranked.items()}

    def _token_text(self, token_id: int) -> str:
        """The token's text; one that is no text by itself keeps its bytes, so that two of them stay apart."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class _TextOffsets:
    """Owns the length, in characters, of the text that came before the next token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._length = 0

    def advance(self, token_id: int) -> int:
        offset = self._length
        self._length += len(self._detokenizer.push([token_id]).text)
        return offset


def _completion_choice(
    index: int, text: str, logprobs: Logprobs | None, finish_reason: Literal["stop", "length"] | None
) -> CompletionChoice:
    """Without validation: the type has no null finish reason, but streamed chunks do."""
    return CompletionChoice.model_construct(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason)
