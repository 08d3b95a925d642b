"""The losslessness matrix of load_tests, on a few prompts: real weights, every drafter, the router in between."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.progress import Progress

from load_tests.losslessness import run_matrix
from load_tests.prompts import all_prompts

pytestmark = pytest.mark.integration


async def test_no_drafter_window_temperature_or_batch_changes_a_token(demo_model_dir: Path) -> None:
    cells = await run_matrix(all_prompts()[46:50:2], 10, (1, 5), Progress(disable=True))
    assert {cell.drafter for cell in cells} == {"n-gram", "demo draft", "draft = target", "random draft"}
    assert [cell for cell in cells if cell.differing] == []
    assert all(cell.tokens == 20 for cell in cells)


async def test_a_draft_that_is_the_target_has_every_guess_accepted(demo_model_dir: Path) -> None:
    cells = await run_matrix(all_prompts()[46:47], 13, (5,), Progress(disable=True))
    greedy = [cell for cell in cells if cell.drafter == "draft = target" and cell.temperature == 0]
    assert greedy
    assert all(cell.acceptance_length == pytest.approx(13 / 3) for cell in greedy)  # 1 + 6 + 6 tokens
