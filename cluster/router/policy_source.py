"""The policy that a router follows."""

from __future__ import annotations

from cluster.config import ClusterConfig
from cluster.control.document import SCHEMA, PolicyDocument, parse_document
from cluster.control.policy import SpeculationPolicy
from cluster.messages import Drafter


def default_document(config: ClusterConfig) -> PolicyDocument:
    """What the configuration's `speculation` section says, as a document without rules."""
    configured = config.speculation
    default: dict[str, object] = {"enabled": configured.enabled, "max_draft_tokens": configured.max_draft_tokens}
    is_off = configured.drafter is Drafter.NONE
    default |= {"enabled": False} if is_off else {"drafter": configured.drafter.value}
    return parse_document({"schema": SCHEMA, "default": default})


def default_policy(config: ClusterConfig) -> SpeculationPolicy:
    """The configured defaults as version 0 of the policy."""
    return SpeculationPolicy.of(default_document(config), 0)
