"""`paceline k8s …`: manifests for a Kubernetes cluster, from the configuration that `paceline serve` reads."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from cluster.cli.common import ConfigOption, console, die, load
from cluster.config import ConfigError

k8s_app = typer.Typer(help="Manifests for a Kubernetes cluster with KubeRay.", no_args_is_help=True)

OverlayOption = Annotated[str, typer.Option(help="The folder in overlays/ that is written.")]
OutOption = Annotated[Path, typer.Option(help="The folder that base/ and overlays/ are written to.")]


@k8s_app.callback()
def k8s() -> None:
    """Manifests for a Kubernetes cluster with KubeRay."""


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


def _write(files: dict[PurePosixPath, str], folder: Path) -> None:
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
