"""An overlay's manifests, as kustomize builds them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from deployments.manifest_checks.findings import ToolAbsent
from deployments.manifest_checks.manifests import ManifestError, Manifests

TIMEOUT_S = 60.0


def build(overlay: Path) -> Manifests:
    """Build a folder that has a kustomization.yaml. Raises ManifestError, and ToolAbsent without kubectl."""
    command = [find_tool("kubectl"), "kustomize", str(overlay)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if built.returncode != 0:
        raise ManifestError(f"{overlay}: kustomize cannot build it: {built.stderr.strip()}")
    return Manifests.parse(built.stdout)


def read(path: Path) -> Manifests:
    """An overlay's folder, or a file of manifests. Raises ManifestError, ToolAbsent and OSError."""
    return build(path) if path.is_dir() else Manifests.parse(path.read_text())


def find_tool(name: str) -> str:
    """A program beside this Python, or on PATH. Raises ToolAbsent."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ToolAbsent(name)
    return found
