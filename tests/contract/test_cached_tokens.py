"""What clients are told of the prefix cache: API, router, engines, no model."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI

from protos.paceline.v1 import inference_pb2 as pb
from tests.contract.api_server import openai_client
from tests.contract.grpc_server import inference_stub
from tests.engines import BLOCK_SIZE
from tests.fakes import ToyModel, ToyRunner, byte_tokenizer
from tests.toy_cluster import MODEL, ToyCluster, request, toy_cluster

pytestmark = pytest.mark.contract

TOKENIZER = byte_tokenizer()
TOY = ToyModel(vocab_size=TOKENIZER.vocab_size)
HI = [{"role": "user", "content": "hi, here I am again"}]
NUM_PROMPT = len(TOKENIZER.apply_chat_template(HI))
FULL = (NUM_PROMPT - 1) // BLOCK_SIZE * BLOCK_SIZE  # of the prompt's tokens, the most that can be cached


def prepare(cluster: ToyCluster) -> None:
    cluster.add_target(runner=ToyRunner(BLOCK_SIZE, TOY))
    cluster.add_draft(runner=ToyRunner(BLOCK_SIZE, TOY))


async def cached(client: AsyncOpenAI, tenant: str = "acme", **fields: Any) -> int:
    """What the usage says, of an answer that is whole."""
    answer = await client.chat.completions.create(
        **{"model": MODEL, "messages": HI, "max_tokens": 6, "seed": 5, **fields},
        extra_headers={"X-Paceline-Tenant": tenant},
        extra_body={"ignore_eos": True},
    )
    return reported(answer.usage)


def reported(usage: Any) -> int:
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens
    return int(usage.prompt_tokens_details.cached_tokens)


async def test_a_prompt_that_was_sent_before_is_cached_for_its_tenant_only() -> None:
    async with toy_cluster(prepare=prepare) as cluster, openai_client(cluster.router) as client:
        assert [await cached(client) for _ in range(2)] == [0, FULL]
        assert await cached(client, "other") == 0
        assert await cached(client, "other", seed=6) == FULL
        assert cluster.is_free()


async def test_a_stream_says_what_the_whole_answer_says() -> None:
    async with toy_cluster(prepare=prepare) as cluster, openai_client(cluster.router) as client:
        for expected in (0, FULL):
            stream = await client.chat.completions.create(
                model=MODEL, messages=HI, max_tokens=6, stream=True, stream_options={"include_usage": True}
            )
            *_, last = [chunk async for chunk in stream]
            assert reported(last.usage) == expected


async def test_choices_share_the_prompts_full_blocks_although_they_start_together() -> None:
    async with toy_cluster(prepare=prepare) as cluster, openai_client(cluster.router) as client:
        assert await cached(client, n=4) == FULL
        (target,) = [host.pool for host in cluster.hosts.values() if "target" in host.info.replica_id]
        prompt_rows = [
            (item.start, len(item.token_ids))
            for step in target.runner.steps
            for item in step.scheduled
            if item.start < FULL
        ]
        assert sum(num_rows for _, num_rows in prompt_rows) <= NUM_PROMPT


async def test_each_prompt_counts_once_and_with_its_luckiest_choice() -> None:
    async with toy_cluster(prepare=prepare) as cluster, openai_client(cluster.router) as client:
        known, new = "a prompt that is known", "something else"
        await client.completions.create(model=MODEL, prompt=known, max_tokens=2)
        answer = await client.completions.create(model=MODEL, prompt=[known, new], n=2, max_tokens=2)
        sizes = [(len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE for text in (known, new)]
        assert reported(answer.usage) == sum(sizes)


async def test_grpc_reports_cached_tokens_too() -> None:
    async with toy_cluster(prepare=prepare) as cluster, inference_stub(cluster.router) as stub:
        request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=range(10, 23)), max_tokens=3, seed=1)
        for expected in (0, 12):
            *_, last = [response async for response in stub.Generate(request)]
            assert last.usage.cached_tokens == expected


async def test_a_moved_request_does_not_report_its_own_output_as_cached() -> None:
    async with toy_cluster(prepare=prepare) as cluster:
        (target,) = [host for host in cluster.hosts.values() if "target" in host.info.replica_id]
        stats = None
        async for delta in cluster.router.generate(request("r", max_tokens=80, ignore_eos=True)):
            if stats is None and delta.finish_reason is None:
                await target.cut()  # it comes back to the same replica, which knows all of it
            stats = delta.stats or stats
        assert stats is not None
        assert (stats.completion_tokens, stats.num_resumes > 0, stats.num_cached_tokens) == (80, True, 0)
        assert target.pool.engine.stats().prefix_cache.num_hit_tokens > 0
