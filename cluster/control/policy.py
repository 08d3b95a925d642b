"""Decides whether and how a request is decoded speculatively. Pure: the same policy and context, the same decision.

In this order, the first that applies: a kill · a deny rule, wherever it stands · the request's own "off" · the first
allow rule whose percentage has the request's bucket · the control arm of the first allow rule whose percentage has not
· the document's default. docs/policy.md says it for operators.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.control.bucketing import bucket
from cluster.control.document import (
    CONTROL,
    DEFAULT,
    OFF,
    ControlArm,
    Effect,
    Kill,
    PolicyDocument,
    Rule,
    RuleAction,
    TargetingKey,
)
from cluster.control.rule_index import RuleIndex, in_order
from cluster.messages.request import MAX_DRAFT_TOKENS, AcceptanceRule, Drafter, SpeculationOverride

_NO_EFFECT = Effect()


class Reason(StrEnum):
    """Why a decision is what it is."""

    KILLED = "killed"  # the kill switch for everything
    KILLED_MODEL = "killed_model"
    KILLED_TENANT = "killed_tenant"
    KILLED_DRAFT_VERSION = "killed_draft_version"
    DENIED = "denied"  # a deny rule matches
    DISABLED_BY_REQUEST = "disabled_by_request"
    RULE = "rule"  # an allow rule lets it in
    OUTSIDE_PERCENT = "outside_percent"  # an allow rule matches, its percentage leaves it out
    DEFAULT = "default"  # no rule matches: the policy's own settings
    REQUEST = "request"  # no rule matches, and the request asked for something else
    DISABLED = "disabled"  # the policy's default is off
    NO_DRAFTER = "no_drafter"  # the drafter asked for has no ready replica


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a decision may depend on. `available` holds the drafters (MODEL, NGRAM) that could guess right now."""

    model: str
    tenant: str = "default"
    workload: str = "default"
    request_id: str = ""
    user: str | None = None
    session: str | None = None
    key_label: str | None = None
    temperature: float = 1.0
    prompt_tokens: int = 0
    draft_version: str | None = None  # of the draft pool that guesses, or would
    override: SpeculationOverride = field(default_factory=SpeculationOverride)
    available: frozenset[Drafter] = frozenset({Drafter.NGRAM})


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do. drafter is MODEL or NGRAM when speculating, else NONE, and max_draft_tokens is then 0.

    rule: the id of the rule that decided, None if none did. variant: the cohort that the request belongs to.
    """

    speculate: bool
    drafter: Drafter
    max_draft_tokens: int
    acceptance: AcceptanceRule
    rule: str | None
    variant: str
    reason: Reason
    policy_version: int
    bucket: int


# --- what a document is compiled to ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompiledKill:
    """The kill switches as sets."""

    all: bool
    models: frozenset[str]
    tenants: frozenset[str]
    draft_versions: frozenset[str]

    @classmethod
    def of(cls, kill: Kill) -> CompiledKill:
        """Compile."""
        return cls(kill.all, *map(_set, (kill.models, kill.tenants, kill.draft_versions)))

    def reason(self, context: PolicyContext) -> Reason | None:
        """Which switch turns this request off; None: none does."""
        if self.all:
            return Reason.KILLED
        if context.model in self.models:
            return Reason.KILLED_MODEL
        if context.tenant in self.tenants:
            return Reason.KILLED_TENANT
        return Reason.KILLED_DRAFT_VERSION if context.draft_version in self.draft_versions else None


@dataclass(frozen=True, slots=True, eq=False)
class SpeculationPolicy:
    """A version of the policy: a document, made ready to be evaluated in microseconds. Equal to itself only."""

    document: PolicyDocument
    version: int
    kill: CompiledKill
    index: RuleIndex
    denies: int  # as in RuleIndex
    num_buckets: tuple[int, ...]  # of each rule: buckets below this number are in

    @classmethod
    def of(cls, document: PolicyDocument, version: int) -> SpeculationPolicy:
        """Compile a document once, evaluate it many times."""
        rules = document.rules
        denies = sum(1 << i for i, rule in enumerate(rules) if rule.action is RuleAction.DENY)
        num_buckets = tuple(rule.basis_points for rule in rules)
        index = RuleIndex.of([rule.match for rule in rules])
        return cls(document, version, CompiledKill.of(document.kill), index, denies, num_buckets)


def _set(names: tuple[str, ...] | None) -> frozenset[str]:
    return frozenset(names or ())


# --- evaluation ------------------------------------------------------------------------------------------------------


def targeting_value(kind: TargetingKey, context: PolicyContext) -> str:
    """The key whose bucket counts: the request's id where it has no such key."""
    match kind:
        case TargetingKey.USER:
            return context.user or context.request_id
        case TargetingKey.SESSION:
            return context.session or context.request_id
        case TargetingKey.TENANT:
            return context.tenant


def evaluate(policy: SpeculationPolicy, context: PolicyContext) -> Decision:
    """Decide for one request, now."""
    document = policy.document
    return _Evaluation(policy, context, bucket(document.salt, targeting_value(document.targeting_key, context))).run()


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """One evaluation: each method either decides or hands on."""

    policy: SpeculationPolicy
    context: PolicyContext
    bucket: int

    def run(self) -> Decision:
        if (killed := self.policy.kill.reason(self.context)) is not None:
            return self._off(killed, OFF)
        matching = self.policy.index.matching(self.context)
        for i in in_order(matching & self.policy.denies):
            return self._off(Reason.DENIED, OFF, self.policy.document.rules[i])
        override = self.context.override
        if override.enabled is False or override.drafter is Drafter.NONE:
            return self._off(Reason.DISABLED_BY_REQUEST, OFF)
        return self._allow(matching)

    def _allow(self, matching: int) -> Decision:
        rules, left_out = self.policy.document.rules, None
        for i in in_order(matching):
            if self.bucket < self.policy.num_buckets[i]:
                return self._on(Reason.RULE, rules[i].variant, rules[i], rules[i].effect)
            left_out = left_out or rules[i]
        return self._default() if left_out is None else self._control(left_out)

    def _control(self, rule: Rule) -> Decision:
        """A request cannot turn on what a percentage leaves out."""
        if rule.control is ControlArm.PLAIN or not self.policy.document.default.enabled:
            return self._off(Reason.OUTSIDE_PERCENT, CONTROL, rule)
        return self._on(Reason.OUTSIDE_PERCENT, CONTROL, rule, _NO_EFFECT)

    def _default(self) -> Decision:
        override = self.context.override
        if not (override.enabled or self.policy.document.default.enabled):
            return self._off(Reason.DISABLED, DEFAULT)
        reason = Reason.DEFAULT if override == SpeculationOverride() else Reason.REQUEST
        return self._on(reason, DEFAULT, None, _NO_EFFECT)

    def _on(self, reason: Reason, variant: str, rule: Rule | None, effect: Effect) -> Decision:
        """What the rule names, binds; what it leaves open is the request's choice, and then the default's."""
        default, override = self.policy.document.default, self.context.override
        drafter = _choose(effect.drafter or override.drafter or default.drafter, self.context.available)
        if drafter is None:
            return self._off(Reason.NO_DRAFTER, variant, rule)
        longest = override.max_draft_tokens or effect.max_draft_tokens or default.max_draft_tokens
        longest = min(longest, effect.max_draft_tokens or MAX_DRAFT_TOKENS, MAX_DRAFT_TOKENS)
        return self._decision(drafter, longest, effect.acceptance or AcceptanceRule.EQUAL, reason, variant, rule)

    def _off(self, reason: Reason, variant: str, rule: Rule | None = None) -> Decision:
        return self._decision(Drafter.NONE, 0, AcceptanceRule.EQUAL, reason, variant, rule)

    def _decision(
        self,
        drafter: Drafter,
        max_draft_tokens: int,
        acceptance: AcceptanceRule,
        reason: Reason,
        variant: str,
        rule: Rule | None,
    ) -> Decision:
        return Decision(
            drafter is not Drafter.NONE,
            drafter,
            max_draft_tokens,
            acceptance,
            None if rule is None else rule.id,
            variant,
            reason,
            self.policy.version,
            self.bucket,
        )


def _choose(wanted: Drafter, available: frozenset[Drafter]) -> Drafter | None:
    order = (Drafter.MODEL, Drafter.NGRAM) if wanted is Drafter.AUTO else (wanted,)
    return next((drafter for drafter in order if drafter in available), None)
