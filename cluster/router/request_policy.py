"""What the policy says of one request."""

from __future__ import annotations

from dataclasses import replace

from cluster.control.policy import Decision, PolicyContext, SpeculationPolicy, evaluate
from cluster.messages.answer import PolicyStamp
from cluster.messages.request import Drafter, GenerateRequest
from cluster.router.draft_link import DraftOffer
from cluster.router.policy_source import PolicySource

_WITH_MODEL = frozenset({Drafter.MODEL, Drafter.NGRAM})
_WITHOUT_MODEL = frozenset({Drafter.NGRAM})


class RequestPolicy:
    """Owns a request's context, and evaluates the policy whenever something that it depends on has changed."""

    def __init__(self, request: GenerateRequest, source: PolicySource, draft_version: str | None) -> None:
        """`draft_version` holds while no draft replica says its own."""
        self._source = source
        self._configured_version = draft_version
        self.draft_version = draft_version  # as of the last decision
        self._context = _context(request)
        self._decided_on: tuple[SpeculationPolicy, DraftOffer] | None = None

    @property
    def killed_versions(self) -> frozenset[str]:
        """Draft versions that are of no use to this request, or any other."""
        return self._source.current.kill.draft_versions

    def decide(self, offer: DraftOffer) -> Decision | None:
        """The decision that holds from now on; None: the last one still does."""
        decided_on = (self._source.current, offer)
        if decided_on == self._decided_on:
            return None
        self._decided_on = decided_on
        available = _WITH_MODEL if offer.is_available else _WITHOUT_MODEL
        self.draft_version = self._configured_version if offer.version is None else offer.version
        context = replace(self._context, available=available, draft_version=self.draft_version)
        return evaluate(self._source.current, context)

    def forget(self) -> None:
        """Decide again next time, whatever has changed."""
        self._decided_on = None


def stamp(decision: Decision) -> PolicyStamp:
    """How a decision is named elsewhere."""
    return PolicyStamp(decision.policy_version, decision.variant, decision.reason.value, decision.rule)


def _context(request: GenerateRequest) -> PolicyContext:
    return PolicyContext(
        request.model,
        request.tenant,
        request.workload,
        request.request_id,
        request.user,
        request.session,
        request.key_label,
        request.sampling.temperature,
        len(request.prompt_token_ids),
        override=request.speculation,
    )
