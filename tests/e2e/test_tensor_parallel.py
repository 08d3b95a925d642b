"""A target of two ranks: one of them is killed, and clients notice nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.e2e.cluster import Cluster, rank_pids, replica_pids, serving, wait_until
from tests.e2e.conftest import demo_config
from tests.e2e.test_failures import PROMPTS, answers

pytestmark = pytest.mark.e2e

EIGHT_PROMPTS = (*PROMPTS, "What is a sonnet?", "List three rivers.", "Who was Ada Lovelace?", "Why is the sky blue?")
MAX_TOKENS = 96


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path) -> Iterator[Cluster]:
    config = demo_config()
    config["models"][0]["target"] |= {"tensor_parallel": 2, "num_cpus": 0.3}
    config["models"][0]["draft"] |= {"num_cpus": 0.3}
    with serving(config, tmp_path_factory.mktemp("divided")) as running:
        yield running


@pytest.fixture
async def client(divided: Cluster) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{divided.url}/v1", api_key="none", max_retries=0, timeout=240) as openai:
        yield openai


async def test_a_rank_killed_in_mid_stream_changes_no_text_and_its_group_is_replaced(
    client: AsyncOpenAI, divided: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = await answers(client, None, prompts=EIGHT_PROMPTS, max_tokens=MAX_TOKENS)
    (leader,), (rank,) = replica_pids("target-smollm2-135m", divided.pid), rank_pids(divided.pid)
    started = asyncio.Event()
    streams = asyncio.create_task(answers(client, "model", started, EIGHT_PROMPTS, MAX_TOKENS))
    await started.wait()
    os.kill(rank, signal.SIGKILL)
    killed_at = time.monotonic()

    def is_replaced() -> bool:
        leaders, ranks = replica_pids("target-smollm2-135m", divided.pid), rank_pids(divided.pid)
        loads = [replica["load"] for replica in divided.replicas("target")]
        return len(leaders) == len(ranks) == 1 and leader not in leaders and rank not in ranks and None not in loads

    await asyncio.to_thread(wait_until, is_replaced, 120, "the group's replacement")
    replaced_s = time.monotonic() - killed_at
    assert await streams == expected
    with capsys.disabled():
        sys.stdout.write(f"\n[a new group of ranks serves {replaced_s:.1f} s after the kill]")
    assert "paceline_resumes_total" in divided.router_metrics()
    wait_until(divided.is_idle, 10, "idleness after the kill")
