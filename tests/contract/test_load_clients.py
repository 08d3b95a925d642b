"""The load tests' client of a URL against the real API."""

from __future__ import annotations

import httpx
import pytest

from load_tests.timed_streams import Ask, HttpClient, Timed, run_timed
from tests.contract.api_server import serving
from tests.fakes import FakeBackend

pytestmark = pytest.mark.contract


async def test_every_part_of_a_streamed_output_is_timed_once_and_the_tenant_is_sent() -> None:
    backend, timed = FakeBackend(("one", " two", " three")), Timed()
    async with serving(backend) as address, httpx.AsyncClient(base_url=address) as http:
        await run_timed(HttpClient(http, "demo"), Ask((1, 2, 3), 8, tenant="loud", speculate=True), timed)
    assert len(timed.times) == 3
    assert len(timed.gaps()) == 2
    assert 0 <= timed.ttft_s <= timed.times[-1] - timed.sent
    (request,) = backend.requests
    assert (request.tenant, request.prompt_token_ids, request.sampling.max_tokens) == ("loud", (1, 2, 3), 8)
    assert request.speculation.enabled is True


@pytest.mark.parametrize("model", ["demo", "unknown"])
async def test_a_failed_request_fails_the_measurement(model: str) -> None:
    backend = FakeBackend(("one", RuntimeError("broken")))
    async with serving(backend) as address, httpx.AsyncClient(base_url=address) as http:
        with pytest.raises(RuntimeError, match="internal" if model == "demo" else "404"):
            await run_timed(HttpClient(http, model), Ask((1,), 8), Timed())
