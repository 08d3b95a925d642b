"""The demo model on 1, 2 and 3 ranks: the same greedy tokens in float32, with and without speculation."""

from __future__ import annotations

from pathlib import Path

import pytest

from load_tests.prompts import all_prompts
from load_tests.tensor_parallel import measure, report

pytestmark = pytest.mark.integration


async def test_ranks_change_no_token_and_share_the_weights(demo_model_dir: Path, demo_draft_dir: Path) -> None:
    prompts = all_prompts()[:3]
    rows = [row for ranks in (1, 2, 3) for row in await measure(ranks, prompts, max_tokens=10)]
    assert report(rows)[1] == 0
    assert [(row.ranks, row.speculation) for row in rows] == [(n, s) for n in (1, 2, 3) for s in (False, True)]
    (whole,) = rows[0].weight_bytes
    for row in rows:
        assert len(row.weight_bytes) == row.ranks
        assert max(row.weight_bytes) < 1.1 * whole / row.ranks  # 9 query heads on two ranks: 6 and 3
        assert sum(row.weight_bytes) < 1.01 * whole
