"""The names of all samples that our processes export."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from cluster.core.step import SchedulerStats
from cluster.metrics.feed import FeedMetrics
from cluster.metrics.pool import PoolMetrics
from cluster.metrics.router import RouterMetrics
from cluster.router.request_feed import FeedTotals


def metric_families() -> list[Metric]:
    """Every metric of routers and pools, without samples of labelled ones."""
    registry = CollectorRegistry()
    RouterMetrics(registry)
    FeedMetrics(registry, FeedTotals)
    PoolMetrics(registry, "model", "target", lambda: SchedulerStats(0, 0, 0, 1, 0))
    return list(registry.collect())


def metric_names() -> frozenset[str]:
    """What a query may name."""
    return frozenset(name for family in metric_families() for name in _samples(family))


def _samples(family: Metric) -> Iterator[str]:
    match family.type:
        case "counter":
            yield from (f"{family.name}{suffix}" for suffix in ("_total", "_created"))
        case "histogram":
            yield from (f"{family.name}{suffix}" for suffix in ("_bucket", "_sum", "_count", "_created"))
        case _:
            yield family.name
