"""Who may ask, on whose behalf, and how much: the access document in force in a router."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from cluster.control.access import OPEN, AccessTable, ApiKey, parse_access
from cluster.control.quota import Quota, QuotaExceeded, Quotas
from cluster.control.store import Snapshot
from cluster.messages.answer import ErrorKind, RequestError
from cluster.messages.request import GenerateRequest


class Access:
    """Owns the access document in force and what tenants have used of their quotas.

    Each of `num_routers` lets in its share of a quota on its own, so a tenant whose requests all come to one router
    gets that share only. The number may change at any time.
    """

    def __init__(self, num_routers: int, clock: Callable[[], float], require_keys: bool = False) -> None:
        """require_keys: let nobody in before there is a document with the caller's key."""
        self.num_routers = num_routers
        self._require_keys = require_keys
        self._clock = clock
        self._table = OPEN
        self._quotas = Quotas(self._quota)

    def apply(self, snapshot: Snapshot) -> None:
        """Put a document in force. Raises DocumentError."""
        self._table = AccessTable(parse_access(snapshot.text))

    def key_holder(self, api_key: str | None) -> ApiKey | None:
        """Whose key it is; None while requests need none. Raises RequestError(UNAUTHENTICATED)."""
        if not (self._table.needs_key or self._require_keys):
            return None
        if api_key is None:
            raise RequestError(ErrorKind.UNAUTHENTICATED, "You didn't provide an API key: Authorization: Bearer <key>")
        holder = self._table.key(api_key)
        if holder is None:
            raise RequestError(ErrorKind.UNAUTHENTICATED, "Incorrect API key provided")
        return holder

    def check_together(self, requests: Sequence[GenerateRequest]) -> None:
        """Raises RequestError unless all of these requests of one call would be let in now.

        OVERLOADED says when to try again; INVALID, that the tenant's quota is smaller than that.
        """
        exceeded = self._quotas.exceeded_by(requests[0].tenant, len(requests), self._clock())
        if exceeded is not None:
            raise _refusal(exceeded, "n" if any(request.choice for request in requests) else "prompt")

    @contextmanager
    def admitted(self, tenant: str, prompt_tokens: int) -> Iterator[Callable[[int], None]]:
        """Inside, a request counts against its tenant's quota; call what it gives with each number of output tokens.

        Raises RequestError(OVERLOADED) naming the limit that is met, and when to try again.
        """
        exceeded = self._quotas.admit(tenant, prompt_tokens, self._clock())
        if exceeded is not None:
            raise _refusal(exceeded)
        try:
            yield lambda num_tokens: self._quotas.charge(tenant, num_tokens, self._clock())
        finally:
            self._quotas.release(tenant)

    def _quota(self, tenant: str) -> Quota:
        return self._table.quota(tenant).share(self.num_routers)


def _refusal(exceeded: QuotaExceeded, param: str | None = None) -> RequestError:
    if exceeded.retry_after_s is None:
        return RequestError(ErrorKind.INVALID, exceeded.message, param)
    return RequestError(ErrorKind.OVERLOADED, exceeded.message, retry_after_s=exceeded.retry_after_s)
