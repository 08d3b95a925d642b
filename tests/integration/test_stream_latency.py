"""The measurement of one hop runs, and its parts add up."""

from __future__ import annotations

import pytest

from cluster.transport.hub import PoolHub
from cluster.transport.server import PoolServer
from cluster.transport.target_stream import TARGET_PROTOCOL
from load_tests.stream_latency import EchoEngine, measure

pytestmark = pytest.mark.integration


async def test_a_round_trip_is_a_command_hop_and_an_event_hop() -> None:
    hub = PoolHub(TARGET_PROTOCOL)
    engine = EchoEngine(hub)
    hub.bind(engine)
    server = PoolServer(hub)
    await server.start()
    latency = await measure(server.address, num_pings=20, num_requests=2)
    await server.stop()
    engine.stop()
    assert 0 < latency.command_hop.p50 < latency.round_trip.p95
    assert 0 < latency.event_hop.p50 < latency.round_trip.p95
    assert latency.round_trip.p50 <= latency.command_hop.p95 + latency.event_hop.p95
