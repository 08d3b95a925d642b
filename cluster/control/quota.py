"""How much each tenant may ask for: requests and tokens per minute, and requests at a time. Pure: time is passed in.

A rate is a bucket that holds one minute's worth and refills evenly, so a tenant may use its minute in one burst. Tokens
are charged when they are known: the prompt when the request is let in, the output as it comes. The bucket may go below
zero; nothing is let in until it is above again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_MINUTE_S = 60.0
_SWEEP_EVERY = 256  # requests between two looks for tenants to forget


@dataclass(frozen=True, slots=True)
class Quota:
    """One tenant's limits; None is none."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_concurrent: int | None = None

    def share(self, num_routers: int) -> Quota:
        """What each of `num_routers` lets in on its own; everyone gets at least one request at a time."""
        return Quota(
            None if self.requests_per_minute is None else self.requests_per_minute / num_routers,
            None if self.tokens_per_minute is None else self.tokens_per_minute / num_routers,
            None if self.max_concurrent is None else max(1, self.max_concurrent // num_routers),
        )


@dataclass(frozen=True, slots=True)
class QuotaExceeded:
    """Why a request is not let in, and when to try again."""

    limit: str  # the name of the Quota's field
    message: str
    retry_after_s: float


@dataclass(slots=True)
class _Bucket:
    """A level that refills by `per_minute`, up to `per_minute` and to at least 1."""

    level: float
    updated_at: float

    def refill(self, per_minute: float, now: float) -> float:
        """The level now."""
        elapsed_s = max(0.0, now - self.updated_at)
        self.level = min(max(1.0, per_minute), self.level + elapsed_s * per_minute / _MINUTE_S)
        self.updated_at = max(now, self.updated_at)
        return self.level


@dataclass(slots=True)
class _Usage:
    """What one tenant has left, and has running."""

    requests: _Bucket
    tokens: _Bucket
    num_running: int = 0


class Quotas:
    """Owns what every tenant has used. `quota_of` gives the limits in force now; they may change at any time.

    A tenant with nothing running and full buckets is forgotten, so state is bounded by what the last minute saw.
    """

    def __init__(self, quota_of: Callable[[str], Quota]) -> None:
        self._quota_of = quota_of
        self._usage: dict[str, _Usage] = {}
        self._num_admitted = 0

    @property
    def num_tenants(self) -> int:
        """Tenants that are remembered."""
        return len(self._usage)

    def admit(self, tenant: str, prompt_tokens: int, now: float) -> QuotaExceeded | None:
        """Let a request in and charge its prompt, or say which limit it meets. Pair with release()."""
        quota = self._quota_of(tenant)
        usage = self._usage.get(tenant) or self._fresh(quota, now)
        exceeded = _exceeded(tenant, quota, usage, now)
        if exceeded is not None:
            return exceeded
        self._usage[tenant] = usage
        usage.num_running += 1
        if quota.requests_per_minute is not None:
            usage.requests.level -= 1
        self._charge(usage, quota, prompt_tokens)
        self._sweep(now)
        return None

    def charge(self, tenant: str, num_tokens: int, now: float) -> None:
        """Output tokens of a request that has been let in."""
        usage, quota = self._usage.get(tenant), self._quota_of(tenant)
        if usage is not None and quota.tokens_per_minute is not None:
            usage.tokens.refill(quota.tokens_per_minute, now)
            self._charge(usage, quota, num_tokens)

    def release(self, tenant: str) -> None:
        """A request that was let in is over."""
        self._usage[tenant].num_running -= 1

    def _fresh(self, quota: Quota, now: float) -> _Usage:
        requests, tokens = quota.requests_per_minute, quota.tokens_per_minute
        return _Usage(_Bucket(max(1.0, requests or 0.0), now), _Bucket(max(1.0, tokens or 0.0), now))

    def _charge(self, usage: _Usage, quota: Quota, num_tokens: int) -> None:
        if quota.tokens_per_minute is not None:
            usage.tokens.level -= num_tokens

    def _sweep(self, now: float) -> None:
        self._num_admitted += 1
        if self._num_admitted % _SWEEP_EVERY == 0:
            idle = [tenant for tenant, usage in self._usage.items() if self._is_full(tenant, usage, now)]
            for tenant in idle:
                del self._usage[tenant]

    def _is_full(self, tenant: str, usage: _Usage, now: float) -> bool:
        quota = self._quota_of(tenant)
        limits = ((usage.requests, quota.requests_per_minute), (usage.tokens, quota.tokens_per_minute))
        full = all(limit is None or bucket.refill(limit, now) >= max(1.0, limit) for bucket, limit in limits)
        return usage.num_running == 0 and full


def _exceeded(tenant: str, quota: Quota, usage: _Usage, now: float) -> QuotaExceeded | None:
    concurrent, requests, tokens = quota.max_concurrent, quota.requests_per_minute, quota.tokens_per_minute
    if concurrent is not None and usage.num_running >= concurrent:
        message = f"tenant {tenant!r} has {usage.num_running} requests running; its limit is {concurrent}"
        return QuotaExceeded("max_concurrent", message, 1.0)
    if requests is not None and (level := usage.requests.refill(requests, now)) < 1:
        message = f"tenant {tenant!r} has used its {requests:g} requests per minute"
        return QuotaExceeded("requests_per_minute", message, (1 - level) * _MINUTE_S / requests)
    if tokens is not None and (level := usage.tokens.refill(tokens, now)) <= 0:
        message = f"tenant {tenant!r} has used its {tokens:g} tokens per minute"
        return QuotaExceeded("tokens_per_minute", message, (1 - level) * _MINUTE_S / tokens)
    return None
