"""Label values that clients can choose, kept to a bounded number."""

from __future__ import annotations

from typing import Final

from cluster.control.top_names import OTHER, TopNames
from cluster.router.observer import RequestLabels

MAX_TENANTS: Final = 50
MAX_WORKLOADS: Final = 20
MAX_PAIRS: Final = 200


class RequestNames:
    """Owns the values of (model, tenant, workload): models are configured, tenants and workloads the busy ones.

    A pair beyond MAX_PAIRS keeps its tenant and has the workload `other`: so there are at most
    MAX_PAIRS + MAX_TENANTS + 1 pairs for each model.
    """

    def __init__(self) -> None:
        self._tenants = TopNames(MAX_TENANTS)
        self._workloads = TopNames(MAX_WORKLOADS)
        self._pairs: set[tuple[str, str]] = set()

    def see(self, labels: RequestLabels) -> tuple[str, str, str]:
        """Count a request that has arrived; its values."""
        self._tenants.see(labels.tenant)
        self._workloads.see(labels.workload)
        return self(labels)

    def __call__(self, labels: RequestLabels) -> tuple[str, str, str]:
        tenant, workload = self._tenants(labels.tenant), self._workloads(labels.workload)
        pair = (tenant, workload)
        if workload != OTHER and pair not in self._pairs:
            if len(self._pairs) == MAX_PAIRS:
                return labels.model, tenant, OTHER
            self._pairs.add(pair)
        return labels.model, tenant, workload
