"""Whether tokens really come out: what a load balancer asks before it sends clients here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Final
from uuid import uuid4

from cluster.messages.answer import ErrorKind, RequestError
from cluster.messages.request import GenerateRequest, SamplingParams
from cluster.transport.backend import InferenceBackend

PROBE_TENANT: Final = "paceline-probe"  # counted in metrics under this name, and left out of reports and rollouts
PROOF_LASTS_S: Final = 5.0
PROBE_TIMEOUT_S: Final = 8.0
_PROMPT: Final = "1"


class Readiness:
    """Owns the latest proof that every model generates. Askers share one look, and a fresh proof needs none."""

    def __init__(
        self,
        backend: Callable[[], InferenceBackend],
        clock: Callable[[], float] = time.monotonic,
        timeout_s: float = PROBE_TIMEOUT_S,
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._timeout_s = timeout_s
        self._proven_at: float | None = None
        self._look: asyncio.Task[str | None] | None = None

    async def problem(self) -> str | None:
        """Generate a token with every model; None if all could, else which one could not and why."""
        if self._proven_at is not None and self._clock() - self._proven_at < PROOF_LASTS_S:
            return None
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._generate_with_all(), name="readiness")
        return await asyncio.shield(self._look)

    async def _generate_with_all(self) -> str | None:
        backend = self._backend()
        for model in backend.models():
            if (problem := await _problem_of(backend, model, self._timeout_s)) is not None:
                return f"{model}: {problem}"
        self._proven_at = self._clock()
        return None


async def _problem_of(backend: InferenceBackend, model: str, timeout_s: float) -> str | None:
    """A model that has no room answers others, so it is well; taking its router away would only make it worse."""
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0, ignore_eos=True)
    token_ids = backend.tokenizer(model).encode(_PROMPT)
    request = GenerateRequest(f"probe-{uuid4().hex}", model, token_ids, sampling, tenant=PROBE_TENANT)
    try:
        async with asyncio.timeout(timeout_s), aclosing(backend.generate(request)) as deltas:
            async for _ in deltas:
                pass
    except RequestError as error:
        return None if error.kind is ErrorKind.OVERLOADED else error.message
    except TimeoutError:
        return f"no token within {timeout_s:g} s"
    return None
