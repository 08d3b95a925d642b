"""What the public APIs need from whatever generates tokens; the router implements it, tests fake it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from cluster.control.access import ApiKey
from cluster.messages.answer import TokenDelta
from cluster.messages.request import GenerateRequest
from cluster.tokenizer import Tokenizer


class InferenceBackend(Protocol):
    """Serves validated, tokenised requests of one or more models."""

    def models(self) -> list[str]:
        """Names that a request's `model` may have."""
        ...

    def tokenizer(self, model: str) -> Tokenizer:
        """The tokenizer of a served model. Raises RequestError(NOT_FOUND) for another name."""
        ...

    def max_model_len(self, model: str) -> int:
        """Most tokens, prompt and output together, of one sequence. Raises RequestError(NOT_FOUND) likewise."""
        ...

    def key_holder(self, api_key: str | None) -> ApiKey | None:
        """Whose key it is; None while requests need none. Raises RequestError(UNAUTHENTICATED) without a good one."""
        ...

    def check_together(self, requests: Sequence[GenerateRequest]) -> None:
        """Raises RequestError if the tenant's quota has no room for all of these requests of one call.

        INVALID: it never has; OVERLOADED: not now.
        """
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Output as it is committed; the last delta has a finish_reason.

        Closing the generator, or cancelling the task that awaits it, cancels the request. Raises RequestError: before
        the first delta when the request is not taken (OVERLOADED, UNAVAILABLE), later when it fails.
        """
        ...

    def ready(self) -> bool:
        """Whether every served model can answer now."""
        ...
