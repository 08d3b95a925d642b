"""The prefix cache on the demo model: what it finds of a chat, and that no token depends on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ClusterConfig, DraftLengthMode, DType, HoldMode, ModelConfig, PoolConfig, SpeculationConfig
from cluster.messages.answer import GenerationStats
from cluster.messages.request import GenerateRequest, SamplingParams
from cluster.router.local import LocalModel, LocalSystem, load_local_model

pytestmark = pytest.mark.integration

MODEL = "smollm2-135m"
BLOCK_SIZE = 16
FIRST = [
    {"role": "system", "content": "You are a patient gardener who answers questions of beginners in plain words."},
    {
        "role": "user",
        "content": "My tomatoes have yellow leaves at the bottom, the soil is heavy clay, and it has rained for two "
        "weeks. I planted them in May between basil and beans, one foot apart. What should I look at first, and what "
        "would you do about it without buying anything?",
    },
]
AGAIN = {"role": "user", "content": "And how often should I water them in a dry summer?"}


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    stats: GenerationStats


def config(prefix_cache: bool, kv_blocks: int) -> ClusterConfig:
    pool: dict[str, Any] = {"dtype": DType.FLOAT32, "max_model_len": 512, "prefix_cache": prefix_cache}
    return ClusterConfig(
        models=(
            ModelConfig(
                name=MODEL,
                target=PoolConfig(path=MODEL, kv_blocks=kv_blocks, **pool),
                draft=PoolConfig(path="smollm2-135m-draft", kv_blocks=256, **pool),
            ),
        ),
        speculation=SpeculationConfig(
            max_draft_tokens=3, draft_length=DraftLengthMode.FIXED, hold=HoldMode.DEADLINE, max_hold_ms=10_000
        ),
    )


class Chat:
    """A system in this process, and its engines."""

    def __init__(self, system: LocalSystem, model: LocalModel) -> None:
        self.system = system
        self.model = model
        self.num_asked = 0

    def tokens(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        return self.model.tokenizer.apply_chat_template(messages)

    async def ask(self, prompt: tuple[int, ...], tenant: str = "A", **fields: Any) -> Answer:
        self.num_asked += 1
        sampling = SamplingParams(**{"max_tokens": 40, "seed": 3, "temperature": 0.7, **fields})
        request = GenerateRequest(f"r{self.num_asked}", MODEL, prompt, sampling, tenant)
        deltas = [delta async for delta in self.system.router.generate(request)]
        stats = deltas[-1].stats
        assert stats is not None
        return Answer(tuple(token_id for delta in deltas for token_id in delta.token_ids), stats)

    def hits(self) -> tuple[int, int]:
        """Tokens that the target's and the draft's caches have spared so far."""
        assert self.model.draft is not None
        target, draft = (engine.stats().prefix_cache for engine in (self.model.target, self.model.draft))
        return target.num_hit_tokens, draft.num_hit_tokens


@asynccontextmanager
async def chatting(prefix_cache: bool = True, kv_blocks: int = 256) -> AsyncIterator[Chat]:
    settings = config(prefix_cache, kv_blocks)
    model = load_local_model(settings.models[0], settings)
    async with LocalSystem(settings, {MODEL: model}) as system:
        yield Chat(system, model)


async def test_a_second_turn_reuses_the_first_and_says_what_a_cold_replica_says(demo_model_dir: Path) -> None:
    async with chatting() as warm:
        prompt = warm.tokens(FIRST)
        first = await warm.ask(prompt)
        said = {"role": "assistant", "content": warm.model.tokenizer.decode(first.token_ids)}
        followed = warm.tokens([*FIRST, said, AGAIN])
        second = await warm.ask(followed)
        full_blocks = (len(prompt) + len(first.token_ids) - 1) // BLOCK_SIZE  # the last token was never computed
        assert full_blocks >= 7
        assert second.stats.num_cached_tokens >= 0.95 * full_blocks * BLOCK_SIZE
        spared_target, spared_draft = warm.hits()
        assert spared_target == second.stats.num_cached_tokens
        assert spared_draft >= len(prompt) // BLOCK_SIZE * BLOCK_SIZE
        stranger = await warm.ask(followed, tenant="B")
        assert stranger.stats.num_cached_tokens == 0
        assert warm.hits() == (spared_target, spared_draft)
    async with chatting(prefix_cache=False) as cold:
        alone = await cold.ask(followed)
        assert (await cold.ask(prompt)).token_ids == first.token_ids
        assert alone.token_ids == second.token_ids == stranger.token_ids
        assert alone.stats.num_cached_tokens == 0


async def test_outputs_of_one_prompt_are_what_each_would_be_alone_even_when_kv_runs_short(demo_model_dir: Path) -> None:
    async with chatting(prefix_cache=False) as cold:
        prompt = cold.tokens(FIRST)
        fields = [{"seed": seed, "temperature": 0.9, "max_tokens": 32, "ignore_eos": True} for seed in range(4)]
        alone = [(await cold.ask(prompt, **sampling)).token_ids for sampling in fields]
    async with chatting(kv_blocks=len(prompt) // BLOCK_SIZE + 8) as warm:
        together = await asyncio.gather(*(warm.ask(prompt, **sampling) for sampling in fields))
        assert [answer.token_ids for answer in together] == alone
        stats = warm.model.target.stats()
        assert stats.num_preemptions > 0
        most_cached = max(answer.stats.num_cached_tokens for answer in together)
        assert most_cached == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert stats.num_free_blocks == stats.num_total_blocks
