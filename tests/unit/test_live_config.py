"""What a running router and the control service follow without a restart."""

from __future__ import annotations

from inspect import iscoroutinefunction

import pytest

from cluster.config import ClusterConfig
from deployments.control import ControlReplica
from deployments.live_config import LiveConfig, live_part, with_live_part
from deployments.router import RouterReplica
from tests.toy_cluster import MODEL, toy_cluster

pytestmark = pytest.mark.unit

CONFIG = ClusterConfig.model_validate({"models": [{"name": MODEL, "target": {"path": "m"}}]})
OFF: LiveConfig = {"speculation": {"enabled": False}}


def test_the_live_part_of_a_configuration_makes_it_of_another_one() -> None:
    other = with_live_part(
        CONFIG, {"speculation": {"max_draft_tokens": 2, "drafter": "ngram"}, "router": {"replicas": 3}}
    )
    assert (other.speculation.max_draft_tokens, other.router.replicas) == (2, 3)
    assert with_live_part(CONFIG, live_part(other)) == other


def test_fields_that_are_not_named_stay_as_they_are() -> None:
    assert with_live_part(CONFIG, OFF).speculation.max_draft_tokens == CONFIG.speculation.max_draft_tokens


def test_a_value_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"speculation\.max_draft_tokens"):
        with_live_part(CONFIG, {"speculation": {"max_draft_tokens": 33}})


async def test_a_router_follows_other_defaults_and_another_number_of_routers() -> None:
    async with toy_cluster() as cluster:
        router = cluster.router
        router.reconfigure(with_live_part(CONFIG, OFF | {"router": {"replicas": 4}}))
        assert not router.policy.current.document.default.enabled
        assert router.access.num_routers == 4


async def test_defaults_do_not_replace_a_policy_that_an_operator_has_put_in_force() -> None:
    async with toy_cluster() as cluster:
        cluster.router.apply_policy("schema: paceline.policy/v1\ndefault: {enabled: true}", 3)
        cluster.router.reconfigure(with_live_part(CONFIG, OFF))
        assert cluster.router.policy.current.version == 3


@pytest.mark.parametrize("replica", [RouterReplica, ControlReplica])
def test_serve_changes_them_on_their_own_event_loop(replica: type[RouterReplica] | type[ControlReplica]) -> None:
    assert iscoroutinefunction(replica.reconfigure)  # Serve runs what is no coroutine in a thread
