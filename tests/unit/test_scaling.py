"""How many replicas a pool wants, and how Serve is told."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.core.scaling import LoadMeter, PoolSignals, draft_replicas, target_replicas
from cluster.core.step import SchedulerStats
from deployments.autoscaling import pool_replicas

pytestmark = pytest.mark.unit


def signals(
    occupancy: float = 0.75, kv_usage: float = 0.0, num_sequences: float = 48, late: float = 0.0
) -> PoolSignals:
    return PoolSignals(occupancy, kv_usage, num_sequences, late)


@pytest.mark.parametrize(
    ("current", "occupancy", "kv_usage", "wanted"),
    [
        (4, 0.75, 0.2, 4),
        (4, 0.82, 0.2, 4),  # within the tolerance
        (4, 0.9, 0.2, 5),
        (4, 1.125, 0.2, 6),  # as full as routers let it become
        (4, 0.2, 0.85, 4),  # KV counts too
        (4, 0.2, 1.0, 5),
        (4, 0.375, 0.2, 2),
        (4, 0.0, 0.0, 1),  # never none
        (4, 9.0, 0.0, 8),  # never more than twice as many at once
        (1, 1.0, 0.0, 2),
    ],
)
def test_a_target_pool_grows_with_its_places_and_its_kv(
    current: int, occupancy: float, kv_usage: float, wanted: int
) -> None:
    assert target_replicas(current, signals(occupancy, kv_usage)) == wanted


def test_a_draft_pool_grows_when_blocks_come_too_late_for_the_targets() -> None:
    assert draft_replicas(2, signals(), late_blocks=0.0) == 2
    assert draft_replicas(2, signals(), late_blocks=0.5) == 4


def test_a_draft_that_is_late_with_few_sessions_is_slow_and_gets_no_help() -> None:
    assert draft_replicas(2, signals(0.75, num_sequences=3), late_blocks=1.0) == 2


def stats(running: int, waiting: int = 0, **holds: int) -> SchedulerStats:
    return SchedulerStats(running, waiting, num_used_blocks=30, num_total_blocks=40, peak_used_blocks=30, holds=holds)


def test_a_meter_tells_what_is_there_now_and_what_came_late_since_it_was_last_read() -> None:
    meter = LoadMeter(max_num_seqs=8)
    assert meter.read(stats(6, 3, arrived=3, expired=1)) == PoolSignals(9 / 8, 0.75, 9, 0.25)
    assert meter.read(stats(4, arrived=3, expired=1)).late_blocks == 0.0
    assert meter.read(stats(4, arrived=4, expired=2, not_worth=2, declined=50)).late_blocks == 0.75


def context(name: str, current: int, **replicas: PoolSignals) -> Any:
    reported: dict[str, dict[str, float]] = {}
    for replica, each in replicas.items():
        for signal, value in asdict(each).items():
            reported.setdefault(signal, {})[replica] = value
    running = [replica for replica in replicas if replica != "gone"]
    return SimpleNamespace(
        deployment_name=name, current_num_replicas=current, running_replicas=running, aggregated_metrics=reported
    )


def test_serve_is_told_a_number_for_every_pool_from_the_means_of_its_replicas() -> None:
    contexts = {
        1: context("target-m", 2, a=signals(1.0, late=0.4), b=signals(0.8, late=0.2)),
        2: context("draft-m", 2, c=signals(0.1, num_sequences=6)),
    }
    assert pool_replicas(contexts) == ({1: 3, 2: 3}, {})


def test_a_draft_pool_goes_by_the_targets_of_its_own_model() -> None:
    contexts = {1: context("target-other", 1, a=signals(late=1.0)), 2: context("draft-m", 2, c=signals())}
    assert pool_replicas(contexts)[0][2] == 2


def test_replicas_that_have_gone_are_not_counted() -> None:
    contexts = {1: context("target-m", 2, a=signals(0.75), gone=signals(9.0))}
    assert pool_replicas(contexts)[0] == {1: 2}


def test_a_pool_that_has_reported_nothing_is_left_as_it_is() -> None:
    assert pool_replicas({1: context("target-m", 2)}) == ({}, {})
