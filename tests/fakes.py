"""Factories and fakes that several test modules share."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from cluster.control.access import ApiKey
from cluster.core.step import SampledTokens, ScheduledSequence, SchedulerOutput, StepOutput
from cluster.messages.answer import (
    ErrorKind,
    FinishReason,
    GenerationStats,
    PolicyStamp,
    RequestError,
    TokenDelta,
    TokenLogprobs,
)
from cluster.messages.request import GenerateRequest, SamplingParams
from cluster.router.access import Access
from cluster.runtime.sampling_batch import SamplingBatch
from cluster.runtime.work import ShouldStop, never
from cluster.tokenizer import IncrementalDetokenizer, Tokenizer, TokenizerError
from tests.chained import run_chain

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
    return Tokenizer(byte_level_backend(), render_chat)


@dataclass
class FakeBackend:
    """Streams scripted answers, one delta per entry, and records what it was asked and which streams it closed.

    An entry is a text (its tokens are one delta), an exception to raise, or None: wait until cancelled.
    """

    script: Sequence[str | Exception | None] = ("Hello", ", world", "!")
    finish_reason: FinishReason = FinishReason.STOP
    max_len: int = 256
    is_ready: bool = True
    policy: PolicyStamp | None = None
    access: Access = field(default_factory=lambda: Access(1, time.monotonic))
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

    def key_holder(self, api_key: str | None) -> ApiKey | None:
        return self.access.key_holder(api_key)

    def ready(self) -> bool:
        return self.is_ready

    def check_together(self, requests: Sequence[GenerateRequest]) -> None:
        self.access.check_together(requests)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        self.requests.append(request)
        try:
            sampling = request.sampling
            detokenizer = IncrementalDetokenizer(self.fake_tokenizer, sampling.stop, min_tokens=sampling.min_tokens)
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
        stop = chunk.stop_string
        return TokenDelta(request.request_id, used, chunk.text, logprobs, finish, stop, policy=self.policy)

    def _last(self, delta: TokenDelta, detokenizer: IncrementalDetokenizer) -> TokenDelta:
        text = delta.text + detokenizer.flush().text
        stats = GenerationStats(prompt_tokens=1, completion_tokens=1, num_steps=1, num_draft_tokens=4)
        return replace(delta, text=text, finish_reason=self.finish_reason, stats=stats)


def _logprobs(request: GenerateRequest, token_id: int) -> TokenLogprobs:
    top = tuple((other, -0.5 - rank) for rank, other in enumerate((token_id, 0, 200)[: request.sampling.num_logprobs]))
    return TokenLogprobs(token_id, -0.5, top)


# --- a model that is a hash ------------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1


def _mix(state: int, value: int) -> int:
    state = ((state ^ value) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
    return state ^ (state >> 29)


@dataclass(frozen=True)
class ToyModel:
    """The next token is a hash of the whole prefix and the seed; with probability 1 - agreement it is off by one."""

    vocab_size: int = 50
    agreement: float = 1.0

    def next_token(self, prefix_hash: int, sampling: SamplingParams) -> int:
        state = _mix(prefix_hash, sampling.seed if sampling.temperature else 0)
        is_right = _mix(state, 1) % 1000 < 1000 * self.agreement
        return (state + (not is_right)) % self.vocab_size

    def logprob(self, prefix_hash: int) -> float:
        """How sure it is of the next token."""
        return math.log(0.2 + _mix(prefix_hash, 2) % 800 / 1000)

    def chance(self, prefix: Sequence[int], token_ids: Sequence[int]) -> float:
        """How sure it is that these tokens follow."""
        hashes = accumulate([*prefix, *token_ids], _mix, initial=0)
        return math.exp(sum(map(self.logprob, list(hashes)[len(prefix) : -1])))

    def continuation(self, prefix: Sequence[int], sampling: SamplingParams, num_tokens: int) -> tuple[int, ...]:
        """What the model says after `prefix`, one token at a time: the truth that an engine must reproduce."""
        prefix_hash = functools.reduce(_mix, prefix, 0)
        output: list[int] = []
        for _ in range(num_tokens):
            output.append(self.next_token(prefix_hash, sampling))
            prefix_hash = _mix(prefix_hash, output[-1])
        return tuple(output)


class ToyRunner:
    """Runs steps on a ToyModel; raises unless the KV that a row reads was computed, in the slots that its table names.

    A slot remembers (position, hash of the tokens up to it). A hash only depends on what was really ingested, so a
    wrong roll-back changes what is sampled, and a slot that another sequence has overwritten breaks the chain.
    """

    def __init__(self, block_size: int, model: ToyModel | None = None) -> None:
        self.model = model or ToyModel()
        self.steps: list[SchedulerOutput] = []
        self.before_step: Callable[[SchedulerOutput], None] = lambda step: None
        self.before_pass: Callable[[], None] = lambda: None  # that is chained
        self.may_write: Callable[[int], bool] = lambda block_id: True  # whether a block is nobody's but the writer's
        self._block_size = block_size
        self._slots: dict[int, tuple[int, int, int]] = {}  # slot -> position, hash before, hash after

    def execute(self, step: SchedulerOutput, should_stop: ShouldStop = never) -> StepOutput:
        self.steps.append(step)
        self.before_step(step)
        return run_chain(self._run, step, self._asked_before_each_pass(should_stop))

    def _asked_before_each_pass(self, should_stop: ShouldStop) -> ShouldStop:
        def ask() -> bool:
            self.before_pass()
            return should_stop()

        return ask

    def _run(self, step: SchedulerOutput) -> StepOutput:
        ids = [item.request_id for item in step.scheduled]
        assert len(set(ids)) == len(ids), "a sequence is in a step twice"
        written = [self._slot(item, item.start + row) for item in step.scheduled for row in range(len(item.token_ids))]
        assert len(set(written)) == len(written), "two sequences write one slot"
        assert all(self.may_write(slot // self._block_size) for slot in written), "a shared block is written"
        hashes = {item.request_id: self._ingest(item) for item in step.scheduled}
        return StepOutput({item.request_id: self._sample(item, hashes) for item in step.scheduled if item.num_samples})

    def _sample(self, item: ScheduledSequence, hashes: Mapping[str, list[int]]) -> SampledTokens:
        sampled = hashes[item.request_id][-item.num_samples :]
        token_ids = tuple(self.model.next_token(prefix_hash, item.sampling) for prefix_hash in sampled)
        if item.sampling.num_logprobs is None:
            return SampledTokens(token_ids)
        return SampledTokens(token_ids, tuple(map(TokenLogprobs, token_ids, map(self.model.logprob, sampled))))

    def _ingest(self, item: ScheduledSequence) -> list[int]:
        """The hash after each row."""
        assert item.token_ids, "a sequence without rows"
        assert 0 <= item.num_samples <= len(item.token_ids)
        prefix_hash = self._read(item)
        hashes = []
        for position, token_id in enumerate(item.token_ids, start=item.start):
            after = _mix(prefix_hash, token_id)
            self._slots[self._slot(item, position)] = (position, prefix_hash, after)
            prefix_hash = after
            hashes.append(after)
        return hashes

    def _read(self, item: ScheduledSequence) -> int:
        prefix_hash = 0
        for position in range(item.start):
            known = self._slots.get(self._slot(item, position))
            assert known is not None, f"{item.request_id}: no KV at position {position}"
            assert known[:2] == (position, prefix_hash), f"{item.request_id}: foreign KV at position {position}"
            prefix_hash = known[2]
        return prefix_hash

    def _slot(self, item: ScheduledSequence, position: int) -> int:
        block_id = item.block_table[position // self._block_size]
        return block_id * self._block_size + position % self._block_size


def sampling(max_tokens: int = 20, seed: int = 7, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, **fields)


# --- tiny random checkpoints ------------------------------------------------------------------------------------------

TINY_VOCAB = 97

_TINY_SHAPE: dict[str, Any] = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def save_tiny_checkpoint(directory: Path, family: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    """Write a random float32 checkpoint in transformers' format and return transformers' own model of it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(_TINY_SHAPE | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # larger than the usual initialisation, so that every part of the network matters
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(directory)
    return model


def save_tiny_draft(directory: Path, vocab: Sequence[int], seed: int = 1, **overrides: Any) -> None:
    """Write a draft checkpoint: one layer, output vocabulary `vocab`, and its target's embedding."""
    import torch
    from safetensors.torch import load_file, save_file

    save_tiny_checkpoint(directory, seed=seed, num_hidden_layers=1, **overrides)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][: len(vocab)].clone()
    tensors["draft_vocab"] = torch.tensor(vocab, dtype=torch.int32)
    save_file(tensors, directory / "model.safetensors")
    edit_json(
        directory / "config.json",
        paceline_draft={"target": None, "shares_target_embedding": True, "output_vocab_size": len(vocab)},
    )


def save_tiny_pair(root: Path, **overrides: Any) -> Path:
    """Write root/target and root/draft, whose output is a part of the target's vocabulary; root."""
    save_tiny_checkpoint(root / "target", **overrides)
    save_tiny_draft(root / "draft", vocab=range(3, 60), **overrides)
    return root


def edit_json(file: Path, **fields: Any) -> None:
    """Set top-level fields of a JSON object in place; None removes one."""
    value = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: field for name, field in value.items() if field is not None}))


# --- sampling ---------------------------------------------------------------------------------------------------------


def sampling_batch(params: Sequence[SamplingParams], positions: Sequence[int]) -> SamplingBatch:
    """One row per element: how it is sampled, and the position of the token it becomes."""
    steps = zip(params, positions, strict=True)
    items = (ScheduledSequence(str(i), (0,), position - 1, (0,), 1, p) for i, (p, position) in enumerate(steps))
    return SamplingBatch.build(SchedulerOutput(tuple(items)))
