"""Fixtures that more than one kind of test needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.runtime.model_store import resolve_model


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The real demo model; downloaded and converted on a machine's first run, as `paceline models fetch` does."""
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def demo_draft_dir() -> Path:
    """The draft that ships with the package."""
    return resolve_model("smollm2-135m-draft")
