"""The measurements of scheduling run, on a few short requests; how fast is no condition."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from rich.progress import Progress

from cluster.config import DType
from load_tests import fairness, long_prompt, off_is_free, preemption
from load_tests.timed_streams import connected

pytestmark = pytest.mark.integration

KV_BLOCKS = 6  # of 16 tokens; a sequence needs up to 5


async def test_short_kv_preempts_and_changes_no_token(demo_model_dir: Path) -> None:
    arms = await preemption.measure(preemption.Workload(8, 8, 24, 48), KV_BLOCKS, Progress(disable=True))
    assert [(arm.speculation, arm.differing) for arm in arms] == 2 * [(False, 0), (True, 0)]
    assert len({arm.tokens for arm in arms}) == 1
    assert [arm.free_blocks for arm in arms] == [arm.kv_blocks for arm in arms]
    short = [arm for arm in arms if arm.kv_blocks == KV_BLOCKS]
    assert sum(arm.preemptions for arm in short) > 0, "how often depends on which requests run at a time"


async def test_streams_go_on_while_a_long_prompt_is_read(demo_model_dir: Path) -> None:
    async with connected(None, long_prompt.served_model(400, DType.BFLOAT16)) as client:
        run = await long_prompt.measure(client, 400, 2, parts_before=24, speculate=False, random=Random(0))
    assert run.num_parts_during >= 2
    assert run.max_to_median >= run.median_itl_during_ms / run.median_itl_ms > 0
    assert len(long_prompt.ratios([run])) == 4


async def test_a_quiet_tenant_is_served_beside_a_loud_one(demo_model_dir: Path) -> None:
    load = fairness.Load(quiet_clients=1, loud_clients=4, prompt_tokens=8, max_tokens=4, requests=3)
    (pair,) = await fairness.run_all(None, load, 1, DType.BFLOAT16, max_num_seqs=4)
    assert 0 < pair.alone_p50_ms <= pair.alone_p95_ms
    assert pair.loud_requests > 0
    assert set(fairness.ratios([pair])) == {"P95 TTFT beside / alone", "median TTFT beside / alone"}


async def test_speculation_that_is_off_is_timed_beside_a_system_without(demo_model_dir: Path) -> None:
    turns = await off_is_free.run_all(DType.BFLOAT16, prompts=1, repeats=1, streams=2, max_tokens=4)
    assert [set(turn.tpot_ms) for turn in turns] == [{"without", "without, again", "off", "on"}]
    assert all(spread.median > 0 for spread in off_is_free.ratios(turns).values())
    many = [off_is_free.Turn({"without": 10.0, "off": 10.0 + i}) for i in range(11)]
    bounds = off_is_free.median_bounds(many, "off")
    assert 1.0 < bounds.low < bounds.estimate == 1.5 < bounds.high < 2.0
