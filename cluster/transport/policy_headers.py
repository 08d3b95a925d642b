"""How an answer says which part of the policy its request followed: HTTP headers, and gRPC metadata of these names."""

from __future__ import annotations

from cluster.messages.answer import PolicyStamp

VARIANT_HEADER = "x-paceline-variant"
POLICY_VERSION_HEADER = "x-paceline-policy-version"


def policy_headers(policy: PolicyStamp | None) -> dict[str, str]:
    """By lower-case name; none for a request that nothing was decided about."""
    if policy is None:
        return {}
    return {VARIANT_HEADER: policy.variant, POLICY_VERSION_HEADER: str(policy.version)}
