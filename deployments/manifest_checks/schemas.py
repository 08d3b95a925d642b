"""Against the schemas of Kubernetes itself, and of the operators whose objects we make."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import yaml

from deployments.manifest_checks.findings import ToolAbsent
from deployments.manifest_checks.manifests import Manifests, name_of

KUBERNETES_VERSION = "1.34"
CUSTOM_KINDS = ("RayService", "PodMonitor", "PrometheusRule")
TIMEOUT_S = 120.0


def core_problems(manifests: Manifests) -> Iterator[str]:
    """Kinds of Kubernetes itself; unknown fields are flaws."""
    try:
        import kubernetes_validate
    except ImportError as error:
        raise ToolAbsent("kubernetes-validate") from error

    for document in manifests.documents:
        if document.get("kind") in CUSTOM_KINDS:
            continue
        try:
            kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(str(part) for part in error.path)
            yield f"{document['kind']} {name_of(document)}: {path}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError:
            yield f"{document['kind']} {name_of(document)}: Kubernetes {KUBERNETES_VERSION} has no such kind"


def custom_problems(folder: Path) -> Callable[[Manifests], Iterable[str]]:
    """A check of custom resources, CEL rules included, with the definitions and the checker in `folder`."""

    def problems(manifests: Manifests) -> Iterator[str]:
        definitions, checker = folder / "kuberay-crds", folder / "tools" / "check_crds.py"
        if not definitions.is_dir() or not checker.is_file():
            raise ToolAbsent("CRDs")
        with tempfile.TemporaryDirectory() as scratch:
            file, needed = Path(scratch) / "manifests", Path(scratch) / "definitions"
            _link_needed(definitions, needed)
            file.write_text(yaml.safe_dump_all(manifests.of_kind(*CUSTOM_KINDS)))
            command = [sys.executable, str(checker), str(needed), str(file)]
            checked = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if checked.returncode not in (0, 1) or "Traceback" in checked.stderr:
            raise ToolAbsent("CRD checker")
        if checked.returncode:
            yield from (line.removeprefix(f"{file}: ") for line in checked.stdout.splitlines()[:-1])

    return problems


def _link_needed(definitions: Path, folder: Path) -> None:
    """Only what we make: the definitions of everything take seconds to read."""
    folder.mkdir()
    wanted = re.compile(rf"^    kind: ({'|'.join(CUSTOM_KINDS)})$", re.MULTILINE)
    for file in definitions.rglob("*.yaml"):
        if wanted.search(file.read_text()):
            (folder / file.name).symlink_to(file.resolve())
