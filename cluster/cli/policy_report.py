"""An explanation of a policy decision as a person and as a program reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator

from cluster.control.document import RuleAction
from cluster.control.explain import Explanation, RuleFinding
from cluster.control.policy import Decision


def as_text(explanation: Explanation) -> str:
    """Several lines, the decision last."""
    return "\n".join(_lines(explanation))


def _lines(explanation: Explanation) -> Iterator[str]:
    decision = explanation.decision
    key = f"{explanation.targeting_key.value} {explanation.targeting_value!r}"
    if explanation.is_fallback:
        key = f"request id {explanation.targeting_value!r} (the request has no {explanation.targeting_key.value})"
    yield f"bucket    {decision.bucket} of 10000, of {key}"
    yield f"kill      {'none applies' if explanation.kill is None else explanation.kill.value}"
    for finding in explanation.findings:
        yield f"rule      {finding.rule.id}: {_finding(finding, decision.bucket)}"
    yield f"decision  {_decision(decision)}"
    yield f"variant   {decision.variant}"
    yield f"reason    {decision.reason.value}{'' if decision.rule is None else f' (rule {decision.rule})'}"


def _finding(finding: RuleFinding, bucket: int) -> str:
    rule = finding.rule
    if not finding.matches:
        return f"{rule.action.value}, does not match: {'; '.join(finding.mismatches)}"
    if rule.action is RuleAction.DENY:
        return "deny, matches"
    comparison = f"bucket {bucket} {'<' if finding.inside else '≥'} {rule.basis_points}"
    return f"allow, matches, {'inside' if finding.inside else 'outside'} {rule.percent:g} % ({comparison})"


def _decision(decision: Decision) -> str:
    if not decision.speculate:
        return "plain decoding"
    return f"speculate with {decision.drafter.value}, at most {decision.max_draft_tokens} guesses"


def as_json(explanation: Explanation) -> str:
    """The same as one JSON object."""
    decision = explanation.decision
    return json.dumps(
        {
            "targeting_key": explanation.targeting_key,
            "targeting_value": explanation.targeting_value,
            "is_fallback": explanation.is_fallback,
            "bucket": decision.bucket,
            "kill": explanation.kill,
            "rules": [
                {
                    "id": finding.rule.id,
                    "action": finding.rule.action,
                    "matches": finding.matches,
                    "mismatches": finding.mismatches,
                    "inside": finding.inside,
                }
                for finding in explanation.findings
            ],
            "decision": {
                "speculate": decision.speculate,
                "drafter": decision.drafter,
                "max_draft_tokens": decision.max_draft_tokens,
                "acceptance": decision.acceptance,
                "rule": decision.rule,
                "variant": decision.variant,
                "reason": decision.reason,
            },
        }
    )
