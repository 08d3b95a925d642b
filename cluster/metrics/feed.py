"""What a router has reported to control of its finished requests."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from cluster.router.request_feed import FeedTotals


class FeedMetrics:
    """One router replica's instruments of its feed."""

    def __init__(self, registry: CollectorRegistry, totals: Callable[[], FeedTotals]) -> None:
        def gauge(name: str, text: str, value: Callable[[FeedTotals], int]) -> None:
            Gauge(f"paceline_{name}", text, registry=registry).set_function(lambda: value(totals()))

        # deriv(paceline_feed_records_sent[5m])
        gauge("feed_records_sent", "Finished requests reported to control", lambda t: t.sent)
        # delta(paceline_feed_records_dropped[5m]) > 0: rollouts and reports miss requests
        gauge("feed_records_dropped", "Finished requests that gave way to later ones", lambda t: t.dropped)
