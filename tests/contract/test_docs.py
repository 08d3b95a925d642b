"""The documentation against the code: nothing is left out, and nothing is named that is not there."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import pytest
from openai.resources.chat.completions import AsyncCompletions as AsyncChatCompletions
from openai.resources.completions import AsyncCompletions as AsyncTextCompletions
from pydantic import BaseModel

from cluster.config import ClusterConfig, load_config
from cluster.metrics.names import metric_families
from cluster.transport.openai_schema import ChatCompletionRequest, CompletionRequest

pytestmark = pytest.mark.contract

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
SAMPLE_SUFFIX = re.compile(r"_(bucket|sum|count|total|created)$")


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """A page without its fenced code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


# --- configuration ---------------------------------------------------------------------------------------------------


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and get_origin(annotation) is None:
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for argument in get_args(annotation):
        if isinstance(argument, (type, UnionType)) or get_origin(argument) is not None:
            yield from models_in(argument)


def fields_of(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    """Every field of a model and of the models inside it, with its default."""
    for name, field in model.model_fields.items():
        yield name, None if field.is_required() else field.default
        for inner in models_in(field.annotation):
            yield from fields_of(inner)


def table_rows(text: str) -> dict[str, list[list[str]]]:
    """The cells after the first of each table row, by the name in its first cell."""
    rows: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        if match := re.match(r"\| `(\w+)` \|(.*)\|$", line):
            rows.setdefault(match[1], []).append([cell.strip() for cell in match[2].split(" | ")])
    return rows


def as_written(default: object) -> str:
    """A default as the documentation writes it."""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, str):
        return f"`{default}`"
    return str(default)


def test_every_configuration_field_has_a_row_with_its_default() -> None:
    rows = table_rows(read(DOCS / "configuration.md"))
    fields = list(fields_of(ClusterConfig))
    assert len(fields) > 30
    for name, default in fields:
        assert name in rows, f"docs/configuration.md has no row for {name}"
        if default is not None and not isinstance(default, BaseModel):
            assert any(as_written(default) == cells[0] for cells in rows[name]), f"{name}: default {default!r}"
    assert set(rows) <= {name for name, _ in fields}


@pytest.mark.parametrize("example", blocks(read(DOCS / "configuration.md"), "yaml"))
def test_configuration_examples_are_valid(example: str, tmp_path: Path) -> None:
    path = tmp_path / "paceline.yaml"
    path.write_text(example if "models:" in example else "models: [{name: m, target: {path: m}}]\n" + example)
    load_config(path)


# --- metrics ---------------------------------------------------------------------------------------------------------


def registered_metrics() -> set[str]:
    """Names as they are exported: counters with _total."""
    return {family.name + "_total" * (family.type == "counter") for family in metric_families()}


def test_every_metric_has_a_row_and_every_row_a_metric() -> None:
    assert set(table_rows(read(DOCS / "metrics.md"))) - {
        "tenant",
        "workload",
        "model",
        "pool",
        "drafter",
        "tactic",
        "position",
        "rule",
        "variant",
        "reason",
    } == (registered_metrics())


def test_no_metric_is_named_that_does_not_exist() -> None:
    known = {SAMPLE_SUFFIX.sub("", name) for name in registered_metrics()}
    for page in PAGES:
        for name in re.findall(r"\bpaceline_(?!draft\b)\w+", read(page)):
            assert SAMPLE_SUFFIX.sub("", name) in known, f"{page.name} names {name}"


# --- dependencies ----------------------------------------------------------------------------------------------------


def test_every_direct_dependency_is_explained() -> None:
    project = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    declared = {re.split(r"[<>=!~ ;]", requirement)[0] for requirement in requirements}
    first_cells = re.findall(r"^\| ([^|]+?) \|", read(DOCS / "dependencies.md"), re.MULTILINE)
    explained = {name for cell in first_cells for name in cell.split(", ")} - {"package", "---"}
    assert explained == declared


# --- the HTTP API ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("create", "fields"),
    [(AsyncChatCompletions.create, ChatCompletionRequest), (AsyncTextCompletions.create, CompletionRequest)],
)
def test_every_parameter_of_the_openai_client_is_declared_and_described(create: Any, fields: type[BaseModel]) -> None:
    of_the_client = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    names = inspect.signature(create).parameters.keys() - of_the_client
    assert len(names) > 15
    assert names <= fields.model_fields.keys()
    described = set(re.findall(r"`(\w+)[`.]", read(DOCS / "api.md")))
    assert fields.model_fields.keys() <= described


# --- links and code --------------------------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    """The fragment that a heading gets."""
    kept = [c for c in heading.strip().lower() if c in " -_" or unicodedata.category(c)[0] in "LN"]
    return "".join(kept).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ (.+)$", prose(read(page)), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(read(page))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{page.name} links to {link}"
        assert not fragment or fragment in anchors(target), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    for path in re.findall(r"`((?:cluster|deployments|protos|tests|load_tests)/[\w./]+)`", prose(read(page))):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_files_that_the_architecture_names_in_short_exist() -> None:
    for path in re.findall(r"`((?:core|control|runtime|transport|router)/[\w/]+\.py)`", read(DOCS / "architecture.md")):
        assert (ROOT / "cluster" / path).is_file(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_parse(page: Path) -> None:
    for block in blocks(read(page), "python"):
        ast.parse(block)
