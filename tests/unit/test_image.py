"""The Dockerfile, as far as it can be looked at without building it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from deployments.manifest_checks.findings import ToolAbsent
from deployments.manifest_checks.kustomize import find_tool
from deployments.manifests.names import RAY_VERSION
from deployments.manifests.pods import CACHE_PATH, GROUP_ID, USER_ID

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
IGNORE = (ROOT / ".dockerignore").read_text().splitlines()


def linted(text: str) -> str:
    try:
        command = [find_tool("hadolint"), "--no-color", "-"]
    except ToolAbsent as error:
        pytest.skip(f"absent: {error}")
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False).stdout


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.+)$", DOCKERFILE, re.MULTILINE)


def test_hadolint_has_nothing_to_say() -> None:
    assert linted(DOCKERFILE) == ""


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        (f"ray:{RAY_VERSION}-py311", "ray", "DL3006"),
        (f"ray:{RAY_VERSION}-py311", "ray:latest", "DL3007"),
        (f"USER {USER_ID}:{GROUP_ID}", "USER root", "DL3002"),
        ("WORKDIR /opt", "WORKDIR opt", "DL3000"),
        ("pip install --no-cache-dir", "sudo pip install", "DL3004"),
    ],
)
def test_a_planted_error_is_caught_by_hadolint(before: str, after: str, rule: str) -> None:
    assert before in DOCKERFILE
    assert rule in linted(DOCKERFILE.replace(before, after))


def test_the_image_and_the_manifests_and_the_packages_have_one_version_of_ray() -> None:
    assert instructions("FROM") == [f"rayproject/ray:{RAY_VERSION}-py311"]
    assert f"ray=={RAY_VERSION}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_it_runs_as_the_user_that_the_manifests_ask_for() -> None:
    assert instructions("USER")[-1] == f"{USER_ID}:{GROUP_ID}"


def test_it_has_what_kuberays_probes_and_the_init_container_need() -> None:
    assert re.search(r"apt-get install .*\bbash\b.*\bwget\b", DOCKERFILE)
    assert f"PACELINE_CACHE={CACHE_PATH}" in DOCKERFILE


def test_what_it_copies_is_let_through_and_nothing_else_is() -> None:
    copied = {name for line in instructions("COPY") for name in line.split()[1:-1]}
    assert copied == {"constraints.txt", "pyproject.toml", "README.md", "LICENSE", *our_packages()}
    assert IGNORE[1] == "*"
    assert {line.removeprefix("!") for line in IGNORE if line.startswith("!")} == copied


def our_packages() -> set[str]:
    """The packages that pyproject.toml puts into a wheel."""
    include = re.search(r"^include = \[(.+)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert include is not None
    return set(re.findall(r'"(\w+)\*"', include[1]))
