"""The measurement of the kill switch runs on a live cluster; how fast is no condition."""

from __future__ import annotations

import pytest

from load_tests import kill_switch
from tests.e2e.cluster import ENVIRONMENT, Cluster

pytestmark = pytest.mark.e2e


async def test_switching_off_changes_no_text_and_fails_no_stream(cluster: Cluster) -> None:
    token = ENVIRONMENT["PACELINE_ADMIN_TOKEN"]
    switches, outcomes = await kill_switch.run_all(cluster.url, token, num_streams=4, repeats=3, max_tokens=48)
    assert [switch.live_streams for switch in switches] == [4, 4, 4]
    assert all(switch.last_proposal_s <= switch.in_force_s for switch in switches)
    assert set(outcomes) == {"same text"}
