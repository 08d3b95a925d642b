"""The vectors in docs/vectors, which other implementations of the policy test themselves against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.control.bucketing import bucket, in_percent
from cluster.control.document import parse_document
from cluster.control.policy import PolicyContext, Reason, SpeculationPolicy, evaluate
from cluster.messages.request import Drafter, SpeculationOverride

pytestmark = pytest.mark.contract

VECTORS = Path(__file__).resolve().parents[2] / "docs" / "vectors"


def read(name: str) -> Any:
    return json.loads((VECTORS / name).read_text(encoding="utf-8"))


BUCKETING, EVALUATION = read("bucketing.json"), read("evaluation.json")


@pytest.mark.parametrize("vector", BUCKETING["buckets"], ids=lambda vector: f"{vector['salt']}-{vector['key'][:16]}")
def test_buckets(vector: dict[str, Any]) -> None:
    assert bucket(vector["salt"], vector["key"]) == vector["bucket"]


def test_percentages() -> None:
    for vector in BUCKETING["percentages"]:
        assert in_percent(vector["bucket"], vector["percent"]) == vector["inside"]


def context_of(fields: dict[str, Any]) -> PolicyContext:
    fields = dict(fields)
    override = fields.pop("override", {})
    if "drafter" in override:
        override = override | {"drafter": Drafter(override["drafter"])}
    available = frozenset(map(Drafter, fields.pop("available")))
    return PolicyContext(**fields, override=SpeculationOverride(**override), available=available)


@pytest.mark.parametrize("case", EVALUATION["cases"], ids=lambda case: case["name"].replace(" ", "-"))
def test_decisions(case: dict[str, Any]) -> None:
    policy = SpeculationPolicy.of(parse_document(EVALUATION["documents"][case["document"]]), 1)
    decision = evaluate(policy, context_of(case["context"]))
    assert {name: getattr(decision, name) for name in case["decision"]} == case["decision"]


def test_there_is_a_case_for_every_reason() -> None:
    assert {case["decision"]["reason"] for case in EVALUATION["cases"]} == set(Reason)
