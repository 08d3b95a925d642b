"""Label values that clients can choose, kept to a bounded number."""

from __future__ import annotations

from typing import Final

from cluster.control.top_names import OTHER, TopNames
from cluster.messages.answer import PolicyStamp
from cluster.router.observer import RequestLabels

MAX_TENANTS: Final = 50
MAX_WORKLOADS: Final = 20
MAX_PAIRS: Final = 200
MAX_RULES: Final = 50
MAX_VARIANTS: Final = 20
MAX_DECISIONS: Final = 300


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


class DecisionNames:
    """Owns the values of (rule, variant, reason): at most MAX_DECISIONS of them, and one more for each reason."""

    def __init__(self) -> None:
        self._rules = TopNames(MAX_RULES)
        self._variants = TopNames(MAX_VARIANTS)
        self._known: set[tuple[str, str, str]] = set()

    def see(self, policy: PolicyStamp) -> tuple[str, str, str]:
        """Count a request that followed a decision; its values."""
        rule = "none" if policy.rule is None else self._rules.see(policy.rule)
        decision = (rule, self._variants.see(policy.variant), policy.reason)
        if decision not in self._known:
            if len(self._known) == MAX_DECISIONS:
                return OTHER, OTHER, policy.reason
            self._known.add(decision)
        return decision
