"""How much each tenant may ask for: requests and tokens per minute, and requests at a time. Pure: time is passed in.

A rate is a bucket that holds one minute's worth and refills evenly, so a tenant may use its minute in one burst. Tokens
are charged when they are known: the prompt when the request is let in, the output as it comes. The bucket may go below
zero; nothing is let in until it is above again. When a limit is raised, the amount that is used stays used; when it is
lowered, the share of the minute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_MINUTE_S = 60.0
_ROUNDING_S = 1e-6
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
    """Why requests are not let in, and when to try again; None: so many are never let in together."""

    limit: str  # the name of the Quota's field
    message: str
    retry_after_s: float | None


@dataclass(slots=True)
class _Bucket:
    """Holds `per_minute`, and at least 1, when it is full. Kept as the time after which it is full again."""

    updated_at: float
    per_minute: float = 0.0  # as of the last look; 0: there was none
    full_in_s: float = 0.0

    def refill(self, now: float) -> None:
        self.full_in_s = max(0.0, self.full_in_s - max(0.0, now - self.updated_at))
        self.updated_at = max(now, self.updated_at)

    def look(self, per_minute: float, now: float) -> None:
        """Refill, and let this be the limit from now on."""
        self.refill(now)
        if per_minute > self.per_minute:
            self.full_in_s *= self.per_minute / per_minute
        self.per_minute = per_minute

    def wait_s(self, amount: float) -> float:
        """How long until it holds this much; 0 if it does."""
        wait_s = self.full_in_s - (capacity(self.per_minute) - amount) * _MINUTE_S / self.per_minute
        return wait_s if wait_s > _ROUNDING_S else 0.0

    def is_empty(self) -> bool:
        return self.full_in_s > capacity(self.per_minute) * _MINUTE_S / self.per_minute - _ROUNDING_S

    def take(self, amount: float) -> None:
        self.full_in_s += amount * _MINUTE_S / self.per_minute


def capacity(per_minute: float) -> float:
    """What may come at once."""
    return max(1.0, per_minute)


@dataclass(slots=True)
class _Usage:
    """What one tenant has left, and has running."""

    requests: _Bucket
    tokens: _Bucket
    num_running: int = 0

    def look(self, quota: Quota, now: float) -> None:
        """Refill, and let these be the limits from now on."""
        for bucket, limit in ((self.requests, quota.requests_per_minute), (self.tokens, quota.tokens_per_minute)):
            if limit is not None:
                bucket.look(limit, now)

    def is_idle(self, now: float) -> bool:
        for bucket in (self.requests, self.tokens):
            bucket.refill(now)
        return self.num_running == 0 and self.requests.full_in_s == self.tokens.full_in_s == 0


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
        quota, usage = self._seen(tenant, now)
        exceeded = _exceeded(tenant, quota, usage, 1)
        if exceeded is not None:
            return exceeded
        self._usage[tenant] = usage
        usage.num_running += 1
        if quota.requests_per_minute is not None:
            usage.requests.take(1)
        if quota.tokens_per_minute is not None:
            usage.tokens.take(prompt_tokens)
        self._sweep(now)
        return None

    def exceeded_by(self, tenant: str, num_requests: int, now: float) -> QuotaExceeded | None:
        """Which limit so many requests at once would meet; None: they would all be let in."""
        return _exceeded(tenant, *self._seen(tenant, now), num_requests)

    def charge(self, tenant: str, num_tokens: int, now: float) -> None:
        """Output tokens of a request that has been let in."""
        quota, usage = self._seen(tenant, now)
        if quota.tokens_per_minute is not None:
            usage.tokens.take(num_tokens)

    def release(self, tenant: str) -> None:
        """A request that was let in is over."""
        self._usage[tenant].num_running -= 1

    def _seen(self, tenant: str, now: float) -> tuple[Quota, _Usage]:
        """The limits in force, and what is used under them now."""
        quota, usage = self._quota_of(tenant), self._usage.get(tenant) or _Usage(_Bucket(now), _Bucket(now))
        usage.look(quota, now)
        return quota, usage

    def _sweep(self, now: float) -> None:
        self._num_admitted += 1
        if self._num_admitted % _SWEEP_EVERY == 0:
            idle = [tenant for tenant, usage in self._usage.items() if usage.is_idle(now)]
            for tenant in idle:
                del self._usage[tenant]


def _exceeded(tenant: str, quota: Quota, usage: _Usage, num_requests: int) -> QuotaExceeded | None:
    for check in (_too_many_at_once, _too_many_requests, _too_many_tokens):
        exceeded = check(tenant, quota, usage, num_requests)
        if exceeded is not None:
            return exceeded
    return None


def _too_many_at_once(tenant: str, quota: Quota, usage: _Usage, num_requests: int) -> QuotaExceeded | None:
    limit = quota.max_concurrent
    if limit is None or usage.num_running + num_requests <= limit:
        return None
    if num_requests > limit:
        message = f"{num_requests} outputs at once are more than a router lets tenant {tenant!r} have running: {limit}"
        return QuotaExceeded("max_concurrent", message, None)
    message = f"tenant {tenant!r} has {usage.num_running} requests running; its limit is {limit}"
    return QuotaExceeded("max_concurrent", message, 1.0)


def _too_many_requests(tenant: str, quota: Quota, usage: _Usage, num_requests: int) -> QuotaExceeded | None:
    limit = quota.requests_per_minute
    if limit is None or not (wait_s := usage.requests.wait_s(num_requests)):
        return None
    if num_requests > capacity(limit):
        message = f"{num_requests} outputs at once are more than a router lets tenant {tenant!r} have in a minute"
        return QuotaExceeded("requests_per_minute", f"{message}: {limit:g}", None)
    return QuotaExceeded("requests_per_minute", f"tenant {tenant!r} has used its {limit:g} requests per minute", wait_s)


def _too_many_tokens(tenant: str, quota: Quota, usage: _Usage, _: int) -> QuotaExceeded | None:
    """Let in while anything is left: what a request will take is not known before."""
    limit = quota.tokens_per_minute
    if limit is None or not usage.tokens.is_empty():
        return None
    message = f"tenant {tenant!r} has used its {limit:g} tokens per minute"
    return QuotaExceeded("tokens_per_minute", message, usage.tokens.wait_s(1))
