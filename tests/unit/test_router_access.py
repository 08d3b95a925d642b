"""Quotas in the router: what counts, what is refused, and what a refusal leaves behind."""

from __future__ import annotations

import pytest

from cluster.control.flaws import DocumentError
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


async def test_the_prompt_of_several_outputs_counts_once() -> None:
    async with toy_cluster(1, 0) as cluster:
        limit(cluster.router, "{tokens_per_minute: 30}")
        for choice in range(4):  # a prompt of 3, and 4 × 6 tokens
            await collect(cluster.router, request(f"choice-{choice}", max_tokens=6, choice=choice))
        assert await collect(cluster.router, request("next", max_tokens=6))
        await refusal(cluster.router, "last")


async def test_outputs_that_do_not_all_fit_are_refused_before_any_begins() -> None:
    async with toy_cluster(1, 0) as cluster:
        limit(cluster.router, "{requests_per_minute: 3}")
        four = [request(f"choice-{choice}", choice=choice) for choice in range(4)]
        with pytest.raises(RequestError, match="4 outputs at once are more than a router lets") as never:
            cluster.router.check_together(four)
        assert (never.value.kind, never.value.param) == (ErrorKind.INVALID, "n")
        cluster.router.check_together(four[:3])
        await collect(cluster.router, request("other"))
        with pytest.raises(RequestError) as later:
            cluster.router.check_together(four[:3])
        assert later.value.retry_after_s == pytest.approx(20, abs=5)
        outcomes = [event.outcome for event in cluster.observer.of(RequestFinished)]
        assert outcomes == [Outcome.INVALID] * 4 + [Outcome.LENGTH] + [Outcome.OVERLOADED] * 3
        assert await collect(cluster.router, request("more"))


async def test_prompts_that_do_not_all_fit_are_refused_by_the_name_of_their_field() -> None:
    async with toy_cluster(1, 0) as cluster:
        limit(cluster.router, "{max_concurrent: 1}")
        with pytest.raises(RequestError) as never:
            cluster.router.check_together([request("one"), request("two")])
        assert (never.value.kind, never.value.param) == (ErrorKind.INVALID, "prompt")


async def test_the_lowest_limit_that_a_document_may_have_says_when_to_come_back() -> None:
    async with toy_cluster(1, 0) as cluster:
        limit(cluster.router, "{requests_per_minute: 0.001, tokens_per_minute: 0.001}")
        await collect(cluster.router, request("first"))
        assert (await refusal(cluster.router, "second")).retry_after_s == pytest.approx(60_000, abs=5)
        with pytest.raises(DocumentError, match=r"at least 0\.001"):
            limit(cluster.router, "{requests_per_minute: 1.0e-320}")


async def test_a_place_is_given_back_however_a_request_ends() -> None:
    async with toy_cluster(1, 0) as cluster:
        limit(cluster.router, "{max_concurrent: 1}")
        stream = cluster.router.generate(request("left", max_tokens=120))
        await anext(stream)
        await refusal(cluster.router, "meanwhile")
        await stream.aclose()
        assert await collect(cluster.router, request("after"))
