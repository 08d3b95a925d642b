"""How much of a replica each tenant has had: who is served next, and who gives way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Share:
    num_sequences: int = 0
    num_served: int = 0  # tokens, counted from an origin that all tenants share


class TenantShares:
    """Owns the tokens computed for each tenant that has sequences here; one without any is forgotten.

    Only differences between tenants mean anything. A tenant that comes to wait is at most `max_lead` tokens ahead of
    whoever has had most, however long it was away or ran little: as much of a burst goes before others' backlog.
    """

    def __init__(self, max_lead: int) -> None:
        self._max_lead = max_lead
        self._shares: dict[str, _Share] = {}

    def __len__(self) -> int:
        return len(self._shares)

    def served(self, tenant: str) -> int:
        """Tokens that the tenant has had, from the common origin."""
        return self._shares[tenant].num_served

    def enter(self, tenant: str) -> None:
        """One more sequence of the tenant is here."""
        self._shares.setdefault(tenant, _Share()).num_sequences += 1

    def leave(self, tenant: str) -> None:
        """One sequence less; with the last one, the tenant is forgotten."""
        share = self._shares[tenant]
        share.num_sequences -= 1
        if not share.num_sequences:
            del self._shares[tenant]

    def come_to_wait(self, tenant: str) -> None:
        """The tenant, with nothing waiting until now, wants service."""
        share = self._shares[tenant]
        most = max(other.num_served for other in self._shares.values())
        share.num_served = max(share.num_served, most - self._max_lead)

    def charge(self, tenant: str, num_tokens: int) -> None:
        self._shares[tenant].num_served += num_tokens
