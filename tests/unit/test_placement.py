"""Where Ray Serve is told to run replicas."""

from __future__ import annotations

import pytest

from cluster.config import PoolConfig
from deployments.app import pool_options

pytestmark = pytest.mark.unit

LABELS = {"pool": "target", "model": "m"}


def test_a_replica_of_one_rank_runs_on_nodes_with_its_labels() -> None:
    options = pool_options(PoolConfig(path="m", label_selector=LABELS))
    assert options["ray_actor_options"]["label_selector"] == LABELS


def test_every_bundle_of_a_group_of_ranks_is_on_a_node_with_its_labels() -> None:
    options = pool_options(PoolConfig(path="m", tensor_parallel=3, num_gpus=1, label_selector=LABELS))
    assert options["placement_group_bundle_label_selector"] == [LABELS] * 3
    assert options["placement_group_bundles"] == [{"CPU": 0.5, "GPU": 1.0}] * 3
    assert "label_selector" not in options["ray_actor_options"]


def test_without_labels_a_replica_runs_anywhere() -> None:
    alone, group = pool_options(PoolConfig(path="m")), pool_options(PoolConfig(path="m", tensor_parallel=2))
    assert "label_selector" not in alone["ray_actor_options"]
    assert "placement_group_bundle_label_selector" not in group
