"""Factories and fakes that several test modules share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from cluster.messages import (
    ErrorKind,
    FinishReason,
    GenerateRequest,
    GenerationStats,
    RequestError,
    TokenDelta,
    TokenLogprobs,
)
from cluster.tokenizer import IncrementalDetokenizer, Tokenizer, TokenizerError

# --- tokenizers and the public APIs' backend ------------------------------------------------------------------------

EOS_ID = 256  # <|im_end|> of the byte tokenizer; ids 0-255 are bytes in the order of the byte-level alphabet


def byte_level_backend() -> tokenizers.Tokenizer:
    """A byte-level tokenizer without merges: one token per UTF-8 byte, two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True), AddedToken("<|im_start|>", special=True)])
    return backend


def render_chat(messages: Sequence[Mapping[str, str]]) -> str:
    """A ChatML template that refuses a conversation that opens with the assistant, as some models' do."""
    if messages[0]["role"] == "assistant":
        raise TokenizerError("the model's chat template refuses the conversation: it must start with the user")
    turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def byte_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_backend(), render_chat, {EOS_ID})


@dataclass
class FakeBackend:
    """Streams scripted answers, one delta per entry, and records what it was asked and which streams it closed.

    An entry is a text (its tokens are one delta), an exception to raise, or None: wait until cancelled.
    """

    script: Sequence[str | Exception | None] = ("Hello", ", world", "!")
    finish_reason: FinishReason = FinishReason.STOP
    max_len: int = 256
    is_ready: bool = True
    fake_tokenizer: Tokenizer = field(default_factory=byte_tokenizer)
    requests: list[GenerateRequest] = field(default_factory=list)
    closed: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)

    def models(self) -> list[str]:
        return ["demo", "org/other"]

    def tokenizer(self, model: str) -> Tokenizer:
        self._check(model)
        return self.fake_tokenizer

    def max_model_len(self, model: str) -> int:
        self._check(model)
        return self.max_len

    def ready(self) -> bool:
        return self.is_ready

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        self.requests.append(request)
        try:
            detokenizer = IncrementalDetokenizer(self.fake_tokenizer, request.sampling.stop)
            for index, entry in enumerate(self.script):
                delta = await self._delta(request, entry, detokenizer)
                if delta.finish_reason is None and index == len(self.script) - 1:
                    delta = self._last(delta, detokenizer)
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self.closed.put_nowait(request.request_id)

    def _check(self, model: str) -> None:
        if model not in self.models():
            raise RequestError(ErrorKind.NOT_FOUND, f"The model `{model}` does not exist", "model")

    async def _delta(
        self, request: GenerateRequest, entry: str | Exception | None, detokenizer: IncrementalDetokenizer
    ) -> TokenDelta:
        if entry is None:
            self.waiting.set()
            await asyncio.Event().wait()
        if not isinstance(entry, str):
            assert isinstance(entry, Exception)
            raise entry
        chunk = detokenizer.push(token_ids := self.fake_tokenizer.encode(entry))
        used = token_ids[: chunk.num_tokens_used]
        logprobs = None if request.sampling.num_logprobs is None else tuple(_logprobs(request, i) for i in used)
        finish = FinishReason.STOP if chunk.stop_string is not None else None
        return TokenDelta(request.request_id, used, chunk.text, logprobs, finish, chunk.stop_string)

    def _last(self, delta: TokenDelta, detokenizer: IncrementalDetokenizer) -> TokenDelta:
        text = delta.text + detokenizer.flush().text
        stats = GenerationStats(prompt_tokens=1, completion_tokens=1, num_steps=1, num_draft_tokens=4)
        return TokenDelta(delta.request_id, delta.token_ids, text, delta.logprobs, self.finish_reason, stats=stats)


def _logprobs(request: GenerateRequest, token_id: int) -> TokenLogprobs:
    top = tuple((other, -0.5 - rank) for rank, other in enumerate((token_id, 0, 200)[: request.sampling.num_logprobs]))
    return TokenLogprobs(token_id, -0.5, top)
