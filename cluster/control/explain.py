"""Why a request is decided as it is: every rule, whether it matches, and what it does not like. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.control.document import Match, Rule, RuleAction, TargetingKey, TemperatureRange, TokenRange
from cluster.control.policy import Decision, PolicyContext, Reason, SpeculationPolicy, evaluate, targeting_value


@dataclass(frozen=True, slots=True)
class RuleFinding:
    """What one rule says about a request.

    mismatches: why it does not match, one for each condition that fails; empty: it matches.
    inside: whether an allow rule's percentage has the bucket; None for a deny rule.
    """

    rule: Rule
    mismatches: tuple[str, ...]
    inside: bool | None

    @property
    def matches(self) -> bool:
        """Whether the rule applies to the request."""
        return not self.mismatches


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision with everything that led to it. kill: the switch that ended it before any rule, None if none did."""

    targeting_key: TargetingKey
    targeting_value: str
    is_fallback: bool  # the request has no such key: its id stands in
    kill: Reason | None
    findings: tuple[RuleFinding, ...]
    decision: Decision


def explain(policy: SpeculationPolicy, context: PolicyContext) -> Explanation:
    """Decide as `evaluate` does, and say why."""
    decision, kind = evaluate(policy, context), policy.document.targeting_key
    own = {TargetingKey.USER: context.user, TargetingKey.SESSION: context.session, TargetingKey.TENANT: context.tenant}
    return Explanation(
        kind,
        targeting_value(kind, context),
        not own[kind],
        policy.kill.reason(context),
        tuple(_finding(rule, context, decision.bucket) for rule in policy.document.rules),
        decision,
    )


def _finding(rule: Rule, context: PolicyContext, bucket: int) -> RuleFinding:
    inside = None if rule.action is RuleAction.DENY else bucket < rule.basis_points
    return RuleFinding(rule, tuple(_mismatches(rule.match, context)), inside)


def _mismatches(match: Match, context: PolicyContext) -> Iterator[str]:
    names = (
        ("tenant", match.tenants, context.tenant),
        ("model", match.models, context.model),
        ("workload", match.workloads, context.workload),
        ("key label", match.key_labels, context.key_label),
        ("draft version", match.draft_versions, context.draft_version),
    )
    for what, wanted, value in names:
        if wanted is not None and value not in wanted:
            yield f"{what} {_shown(value)} is not {_alternatives(wanted)}"
    numbers = (
        ("temperature", match.temperature, context.temperature),
        ("prompt tokens", match.prompt_tokens, context.prompt_tokens),
    )
    for what, limits, number in numbers:
        if limits is not None and (problem := _outside(limits, number)) is not None:
            yield f"{what} {number:g} is {problem}"


def _outside(limits: TemperatureRange | TokenRange, value: float) -> str | None:
    if limits.min is not None and value < limits.min:
        return f"below {limits.min:g}"
    if limits.max is not None and value > limits.max:
        return f"above {limits.max:g}"
    return None


def _shown(value: str | None) -> str:
    return "(none)" if value is None else repr(value)


def _alternatives(names: tuple[str, ...]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) == 1 else f"one of {shown}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
