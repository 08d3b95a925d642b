"""The policy that a router follows, and how it is replaced."""

from __future__ import annotations

from collections.abc import Callable

from cluster.config import ClusterConfig
from cluster.control.document import SCHEMA, PolicyDocument, parse_document
from cluster.control.policy import SpeculationPolicy
from cluster.messages.request import Drafter

DEFAULT_VERSION = 0  # of what the configuration says, while no document has been put in force


class PolicySource:
    """Owns the policy in force. It is replaced as a whole, and whoever follows it is told in the same call."""

    def __init__(self, policy: SpeculationPolicy) -> None:
        self._current = policy
        self.on_change: Callable[[], None] | None = None

    @property
    def current(self) -> SpeculationPolicy:
        """The policy in force."""
        return self._current

    def apply(self, document: PolicyDocument, version: int) -> None:
        """Put a document in force, whichever version was in force before."""
        self._current = SpeculationPolicy.of(document, version)
        if self.on_change is not None:
            self.on_change()

    def apply_default(self, document: PolicyDocument) -> None:
        """Put other configured defaults in force, unless a document of the control service is."""
        if self._current.version == DEFAULT_VERSION:
            self.apply(document, DEFAULT_VERSION)


def default_document(config: ClusterConfig) -> PolicyDocument:
    """What the configuration's `speculation` section says, as a document without rules."""
    configured = config.speculation
    default: dict[str, object] = {"enabled": configured.enabled, "max_draft_tokens": configured.max_draft_tokens}
    is_off = configured.drafter is Drafter.NONE
    default |= {"enabled": False} if is_off else {"drafter": configured.drafter.value}
    return parse_document({"schema": SCHEMA, "default": default})


def default_policy(config: ClusterConfig) -> SpeculationPolicy:
    """The configured defaults as version 0 of the policy."""
    return SpeculationPolicy.of(default_document(config), DEFAULT_VERSION)
