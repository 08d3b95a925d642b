"""What clients notice when a replica is killed: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.e2e.cluster import MODEL, Cluster, wait_until

pytestmark = pytest.mark.e2e

PROMPTS = ("What is calculus?", "Explain bees in simple terms.", "Write a poem about gardening.", "What are volcanoes?")
MAX_TOKENS = 160


async def answers(
    client: AsyncOpenAI,
    drafter: str | None,
    started: asyncio.Event | None = None,
    prompts: Sequence[str] = PROMPTS,
    max_tokens: int = MAX_TOKENS,
) -> list[str]:
    """Every prompt at once; sets `started` when the first token of the last of them has come."""
    pending = len(prompts)

    async def answer(index: int, prompt: str) -> str:
        nonlocal pending
        speculation: dict[str, Any] = {"enabled": False} if drafter is None else {"enabled": True, "drafter": drafter}
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            temperature=0.7,
            seed=index,
            stream=True,
            extra_body={"speculation": speculation, "ignore_eos": True},
        )
        text = ""
        async for chunk in stream:
            delta = (chunk.choices[0].delta.content or "") if chunk.choices else ""
            if delta and not text:
                pending -= 1
                if pending == 0 and started is not None:
                    started.set()
            text += delta
        return text

    return await asyncio.gather(*(answer(index, prompt) for index, prompt in enumerate(prompts)))


@pytest.mark.parametrize(("pool", "cause"), [("draft", "fallbacks"), ("target", "resumes")])
async def test_a_replica_killed_in_mid_stream_changes_no_text(
    client: AsyncOpenAI, cluster: Cluster, pool: str, cause: str
) -> None:
    expected = await answers(client, None)
    (before,) = cluster.replicas(pool)
    started = asyncio.Event()
    streams = asyncio.create_task(answers(client, "model", started))
    await started.wait()
    cluster.kill_replica(f"{pool}-{MODEL}")
    assert await streams == expected
    assert f"paceline_{cause}_total" in cluster.router_metrics()

    def is_replaced() -> bool:
        return [replica["load"] is not None and replica["replica_id"] for replica in cluster.replicas(pool)] not in (
            [],
            [False],
            [before["replica_id"]],
        )

    wait_until(is_replaced, 60, f"the {pool} replica's replacement")
    wait_until(cluster.is_idle, 5, "idleness after the kill")
    assert await answers(client, "model") == expected
