"""The policy rule that a rollout moves: how its percentage is set, and how somebody else's edit is noticed. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from cluster.control.document import PolicyDocument, Rule, RuleAction, parse_document
from cluster.control.rollout_spec import RolloutSpec


class RuleEditedError(ValueError):
    """The rule is not as the rollout left it; the message says what is different."""


@dataclass(frozen=True, slots=True)
class AppliedRule:
    """A rule as a rollout left it, in a version of the policy.

    rest: digest of what the rule says besides its percentage. surroundings: of what else decides who is in which cohort
    and what the control gets: salt, targeting key, kill switches and default.
    """

    percent: float
    version: int
    rest: str
    surroundings: str


def find_rule(document: PolicyDocument, rule_id: str) -> Rule | None:
    """The rule of this id."""
    return next((rule for rule in document.rules if rule.id == rule_id), None)


def applied_rule(document: PolicyDocument, version: int, rule_id: str) -> AppliedRule | None:
    """The rule as it stands; None if there is none."""
    rule = find_rule(document, rule_id)
    if rule is None:
        return None
    rest = rule.model_dump(mode="json", exclude={"percent"})
    around = document.model_dump(mode="json", include={"salt", "targeting_key", "kill", "default"})
    return AppliedRule(rule.percent, version, _digest(rest), _digest(around))


def edit_of(
    document: PolicyDocument, rule_id: str, known: AppliedRule, pending_percent: float | None = None
) -> str | None:
    """What somebody else has changed about the rule since it was `known`; None: nothing."""
    stands = applied_rule(document, 0, rule_id)
    if stands is None:
        return f"rule {rule_id} is gone"
    if stands.percent not in (known.percent, pending_percent):
        return f"rule {rule_id} is at {stands.percent:g} %, not at {known.percent:g} %"
    return f"rule {rule_id} says something else than before" if stands.rest != known.rest else None


def with_percent(
    document: PolicyDocument, spec: RolloutSpec, rule_id: str, known: AppliedRule | None, percent: float
) -> PolicyDocument | None:
    """The document with the rule's percentage; None if it has it already.

    Without `known` a rule is made in front of all others, for a target that is a match. Raises RuleEditedError if the
    rule is neither as it is known nor as it is to be.
    """
    rule = find_rule(document, rule_id)
    if rule is None:
        if known is not None or spec.target.match is None:
            raise RuleEditedError(f"rule {rule_id} is gone")
        return _with_rules(document, [_new_rule(spec, rule_id, percent), *_rules(document)])
    if known is not None and (edit := edit_of(document, rule_id, known, percent)):
        raise RuleEditedError(edit)
    return None if rule.percent == percent else forced_percent(document, rule_id, percent)


def forced_percent(document: PolicyDocument, rule_id: str, percent: float) -> PolicyDocument | None:
    """The document with the rule's percentage, whatever the rule says otherwise; None if there is nothing to do."""
    rule = find_rule(document, rule_id)
    if rule is None or rule.action is RuleAction.DENY or rule.percent == percent:
        return None
    rules = [values | {"percent": percent} if values["id"] == rule_id else values for values in _rules(document)]
    return _with_rules(document, rules)


def _new_rule(spec: RolloutSpec, rule_id: str, percent: float) -> dict[str, Any]:
    match = {} if spec.target.match is None else spec.target.match.model_dump(mode="json", exclude_defaults=True)
    return {"id": rule_id, "match": match, "action": "allow", "percent": percent, "control": "plain"}


def _rules(document: PolicyDocument) -> list[dict[str, Any]]:
    return [rule.model_dump(mode="json", exclude_defaults=True) for rule in document.rules]


def _with_rules(document: PolicyDocument, rules: list[dict[str, Any]]) -> PolicyDocument:
    values = document.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return parse_document(values | {"rules": rules})


def _digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
