"""Alert rules: whether Prometheus can read them, and whether the metrics that they are about exist."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from cluster.metrics.names import metric_names
from deployments.manifest_checks.findings import ToolAbsent
from deployments.manifest_checks.kustomize import find_tool
from deployments.manifest_checks.manifests import Json, Manifests

_PARTS = ("lhs", "rhs", "args", "expr", "param", "vector_selector")  # what an expression is made of
TIMEOUT_S = 60.0


def promql_problems(manifests: Manifests) -> Iterator[str]:
    """Expressions that do not parse, or whose types do not fit."""
    parser = _parser()
    for rule in _rules(manifests):
        try:
            parser.parse(rule["expr"])
        except ValueError as error:
            yield f"alert {rule['alert']}: {error}"


def metric_problems(manifests: Manifests) -> Iterator[str]:
    """Metrics that no process of ours has."""
    parser, known = _parser(), metric_names()
    for rule in _rules(manifests):
        try:
            expression = parser.parse(rule["expr"])
        except ValueError:
            continue  # said by promql_problems
        for name in sorted(set(_names(expression)) - known):
            yield f"alert {rule['alert']}: there is no metric {name}"


def promtool_problems(manifests: Manifests) -> Iterator[str]:
    """What Prometheus' own tool says of the rules, templates in annotations included."""
    tool = find_tool("promtool")
    groups = [group for rule in manifests.of_kind("PrometheusRule") for group in rule["spec"]["groups"]]
    if not groups:
        return
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump({"groups": groups}, file)
        command = [tool, "check", "rules", file.name]
        checked = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if checked.returncode:
            yield from (line.strip().replace(Path(file.name).name, "rules") for line in checked.stderr.splitlines())


def _rules(manifests: Manifests) -> Iterator[Json]:
    for document in manifests.of_kind("PrometheusRule"):
        for group in document["spec"]["groups"]:
            yield from group["rules"]


def _names(expression: Any) -> Iterator[str]:
    """The metrics in an expression."""
    if type(expression).__name__ == "VectorSelector" and expression.name:
        yield expression.name
    for part in _PARTS:
        inner = getattr(expression, part, None)
        for each in inner if isinstance(inner, list) else [inner]:
            if each is not None:
                yield from _names(each)


def _parser() -> Any:
    try:
        import promql_parser
    except ImportError as error:
        raise ToolAbsent("promql-parser") from error
    return promql_parser
