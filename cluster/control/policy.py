"""Decides whether and how a request is decoded speculatively. Pure: the same policy and context, the same decision."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.messages import MAX_DRAFT_TOKENS, Drafter, SpeculationOverride


class Reason(StrEnum):
    """Why a decision is what it is."""

    DEFAULT = "default"  # the policy's own settings
    REQUEST = "request"  # the request asked for something else
    DISABLED = "disabled"  # the policy's default is off
    DISABLED_BY_REQUEST = "disabled_by_request"
    NO_DRAFTER = "no_drafter"  # the drafter asked for has no ready replica


@dataclass(frozen=True, slots=True)
class SpeculationPolicy:
    """One version of the operator's settings."""

    version: int = 0
    enabled: bool = True
    max_draft_tokens: int = 5
    drafter: Drafter = Drafter.AUTO


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a decision may depend on. `available` holds the drafters (MODEL, NGRAM) that could guess right now."""

    model: str
    tenant: str = "default"
    workload: str = "default"
    override: SpeculationOverride = field(default_factory=SpeculationOverride)
    available: frozenset[Drafter] = frozenset({Drafter.NGRAM})


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do. drafter is MODEL or NGRAM when speculating, else NONE, and max_draft_tokens is then 0."""

    speculate: bool
    drafter: Drafter
    max_draft_tokens: int
    reason: Reason
    policy_version: int


def evaluate(policy: SpeculationPolicy, context: PolicyContext) -> Decision:
    """Decide for one request, now: what the request leaves open is the policy's, within the hard limit on K."""
    override = context.override
    enabled = policy.enabled if override.enabled is None else override.enabled
    wanted = override.drafter or policy.drafter
    if not enabled or wanted is Drafter.NONE:
        by_request = override.enabled is False or override.drafter is Drafter.NONE
        return _off(policy, Reason.DISABLED_BY_REQUEST if by_request else Reason.DISABLED)
    drafter = _choose(wanted, context.available)
    if drafter is None:
        return _off(policy, Reason.NO_DRAFTER)
    max_draft_tokens = min(override.max_draft_tokens or policy.max_draft_tokens, MAX_DRAFT_TOKENS)
    reason = Reason.DEFAULT if override == SpeculationOverride() else Reason.REQUEST
    return Decision(True, drafter, max_draft_tokens, reason, policy.version)


def _choose(wanted: Drafter, available: frozenset[Drafter]) -> Drafter | None:
    order = (Drafter.MODEL, Drafter.NGRAM) if wanted is Drafter.AUTO else (wanted,)
    return next((drafter for drafter in order if drafter in available), None)


def _off(policy: SpeculationPolicy, reason: Reason) -> Decision:
    return Decision(False, Drafter.NONE, 0, reason, policy.version)
