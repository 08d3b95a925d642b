"""What a person sees of a download: a bar on a terminal, two log lines per phase elsewhere."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from cluster.runtime.fetch_progress import FetchProgress, show_progress

pytestmark = pytest.mark.unit

STEPS = [FetchProgress(phase, done, 4) for phase in ("downloading", "converting") for done in (0, 1, 4, 4)]


def test_a_terminal_shows_a_bar_per_phase() -> None:
    screen = io.StringIO()
    with show_progress(Console(file=screen, force_terminal=True, width=80)) as progress:
        for step in STEPS:
            progress(step)
    assert "downloading" in screen.getvalue()
    assert "converting" in screen.getvalue()
    assert "100%" in screen.getvalue()


def test_elsewhere_each_phase_says_that_it_started_and_that_it_is_done(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    screen = io.StringIO()
    with show_progress(Console(file=screen, force_terminal=False)) as progress:
        for step in STEPS:
            progress(step)
    assert caplog.messages == ["downloading: started", "downloading: done", "converting: started", "converting: done"]
    assert screen.getvalue() == ""
