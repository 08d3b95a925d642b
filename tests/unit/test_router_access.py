"""Quotas in the router: what counts, what is refused, and what a refusal leaves behind."""

from __future__ import annotations

import pytest

from cluster.control.store import Kind, Snapshot, VersionInfo
from cluster.messages.answer import ErrorKind, RequestError
from cluster.router.observer import Outcome, RequestFinished
from cluster.router.router import Router
from tests.toy_cluster import collect, request, right_output, tokens_of, toy_cluster

pytestmark = pytest.mark.unit


def limit(router: Router, limits: str) -> None:
    text = f"schema: paceline.access/v1\nquotas: {{tenants: {{default: {limits}}}}}\n"
    router.access.apply(Snapshot(VersionInfo(Kind.ACCESS, 1, "", "ann", "", 0.0, ""), text))


async def refusal(router: Router, request_id: str, **fields: str) -> RequestError:
    with pytest.raises(RequestError) as failure:
        await collect(router, request(request_id, **fields))
    assert failure.value.kind is ErrorKind.OVERLOADED
    return failure.value


async def test_a_request_over_the_quota_is_told_when_to_come_back_and_others_are_served() -> None:
    async with toy_cluster(1, 0) as cluster:
        limit(cluster.router, "{requests_per_minute: 1}")
        assert tokens_of(await collect(cluster.router, request("first"))) == right_output(request())
        refused = await refusal(cluster.router, "second")
        assert refused.retry_after_s == pytest.approx(60, abs=5)
        assert await collect(cluster.router, request("other", tenant="other"))
        outcomes = {event.request_id: event.outcome for event in cluster.observer.of(RequestFinished)}
        assert outcomes["second"] is Outcome.OVERLOADED
        await cluster.until(cluster.is_free)


async def test_output_tokens_count() -> None:
    async with toy_cluster(1, 0) as cluster:
        limit(cluster.router, "{tokens_per_minute: 30}")
        await collect(cluster.router, request("first", max_tokens=28))  # with its prompt of 3, one too many
        assert "tokens per minute" in (await refusal(cluster.router, "second")).message


async def test_a_place_is_given_back_however_a_request_ends() -> None:
    async with toy_cluster(1, 0) as cluster:
        limit(cluster.router, "{max_concurrent: 1}")
        stream = cluster.router.generate(request("left", max_tokens=120))
        await anext(stream)
        await refusal(cluster.router, "meanwhile")
        await stream.aclose()
        assert await collect(cluster.router, request("after"))
