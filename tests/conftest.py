"""Fixtures that more than one kind of test needs."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

from cluster.runtime.model_store import resolve_model

# How long an example takes says how busy the machine is; pytest-timeout bounds tests that hang.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The real demo model; downloaded and converted on a machine's first run, as `paceline models fetch` does."""
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def demo_draft_dir() -> Path:
    """The draft that ships with the package."""
    return resolve_model("smollm2-135m-draft")
