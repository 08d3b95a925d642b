"""Finished requests by dimension in Prometheus: every one in each dimension, and series within the stated bound."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from cluster.control.finished_request import FinishedRequest, FollowedPolicy, Outcome, RequestGuesses, RequestTimes
from cluster.messages.request import Drafter
from cluster.metrics.breakdown import DIMENSIONS, MAX_CHILDREN, MAX_VALUES, BreakdownMetrics
from tests.finished import finished, guessed

pytestmark = pytest.mark.unit

NAME = "paceline_breakdown"


def children(registry: CollectorRegistry) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """Each family with each of its label sets; a histogram's buckets are one."""
    return {
        (family.name, frozenset((k, v) for k, v in sample.labels.items() if k != "le"))
        for family in registry.collect()
        for sample in family.samples
    }


def test_a_request_is_counted_once_in_every_dimension() -> None:
    registry = CollectorRegistry()
    metrics = BreakdownMetrics(registry)
    metrics.request_finished(finished(variant="canary", tpot_s=0.02, guesses=guessed(1.5, 50, fell_back=True)))
    metrics.request_finished(finished(variant="control", outcome=Outcome.ERROR))

    def value(name: str, dimension: str, value: str, **labels: str) -> float | None:
        named = {"model": "m", "dimension": dimension, "value": value, **labels}
        return registry.get_sample_value(f"{NAME}_{name}", named)

    (family,) = (f for f in registry.collect() if f.name == f"{NAME}_requests")
    counts = [sample for sample in family.samples if sample.name.endswith("_total")]
    for dimension in DIMENSIONS:
        assert sum(sample.value for sample in counts if sample.labels["dimension"] == dimension) == 2
    assert value("requests_total", "variant", "canary", outcome="length") == 1
    assert value("requests_total", "variant", "control", outcome="error") == 1
    assert value("fallbacks_total", "draft_version", "d1") == 1
    assert value("fallbacks_total", "draft_version", "none") is None
    assert value("output_tokens_total", "variant", "canary") == 60
    assert value("target_steps_total", "variant", "canary") == 40
    assert value("verified_tokens_total", "drafter", "model", position="1") == 40
    assert value("accepted_tokens_total", "drafter", "model", position="1") == 10
    assert value("time_per_output_token_seconds_sum", "prompt_tokens", "0-128") == pytest.approx(0.03)
    assert value("inter_token_latency_p95_seconds_count", "temperature", "0.5-1") == 2


def test_later_positions_of_a_block_are_together() -> None:
    registry = CollectorRegistry()
    many = RequestGuesses(Drafter.MODEL, "d1", False, 9.0, (1,) * 20, (1,) * 9 + (0,) * 11)
    BreakdownMetrics(registry).request_finished(finished(guesses=many))
    labels = {"model": "m", "dimension": "drafter", "value": "model", "position": "8+"}
    assert registry.get_sample_value(f"{NAME}_verified_tokens_total", labels) == 12
    assert registry.get_sample_value(f"{NAME}_accepted_tokens_total", labels) == 1


def hostile(number: int) -> FinishedRequest:
    """Names that nobody has used before, and every value of everything else in turn."""
    return FinishedRequest(
        f"r{number}",
        0.0,
        "m",
        f"tenant-{number}",
        f"workload-{number}",
        list(Outcome)[number % len(Outcome)],
        (0.0, 0.4, 0.9, 2.0)[number % 4],
        10 ** (number % 6),
        10 ** (number % 5) - 1,
        FollowedPolicy(1, 1, f"variant-{number}") if number % 3 else None,
        RequestTimes(0.1, 0.1, 0.1, 0.1),
        RequestGuesses(
            (Drafter.MODEL, Drafter.NGRAM, Drafter.NONE)[number % 3],
            f"draft-{number}",
            True,
            1.0,
            (1,) * 32,
            (1,) * 32,
        ),
    )


def test_ten_thousand_hostile_names_stay_within_the_stated_bound() -> None:
    registry = CollectorRegistry()
    metrics = BreakdownMetrics(registry)
    for number in range(10_000):
        metrics.request_finished(hostile(number))
    found = children(registry)
    values = {(dict(labels)["dimension"], dict(labels)["value"]) for _, labels in found}
    assert MAX_VALUES / 3 < len(values) <= MAX_VALUES
    assert len(found) <= MAX_CHILDREN
    text = " ".join((Path(__file__).parents[2] / "docs/metrics.md").read_text().split())
    assert f"at most {MAX_VALUES} values in all dimensions together, and {MAX_CHILDREN:,} series for each model" in text
