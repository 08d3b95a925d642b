"""What the speculation policy decides, and why."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.control.policy import PolicyContext, Reason, SpeculationPolicy, evaluate
from cluster.messages import MAX_DRAFT_TOKENS, Drafter, SpeculationOverride

pytestmark = pytest.mark.unit

ALL = frozenset({Drafter.MODEL, Drafter.NGRAM})
NO_MODEL = frozenset({Drafter.NGRAM})


def context(available: frozenset[Drafter] = ALL, **override: Any) -> PolicyContext:
    return PolicyContext("m", override=SpeculationOverride(**override), available=available)


def test_auto_prefers_the_draft_model_and_falls_back_to_n_grams() -> None:
    policy = SpeculationPolicy(version=3)
    assert evaluate(policy, context()).drafter is Drafter.MODEL
    assert evaluate(policy, context(NO_MODEL)).drafter is Drafter.NGRAM
    assert evaluate(policy, context()).policy_version == 3
    assert evaluate(policy, context()).reason is Reason.DEFAULT


def test_a_request_overrides_what_it_names_and_nothing_else() -> None:
    policy = SpeculationPolicy(max_draft_tokens=5)
    decision = evaluate(policy, context(max_draft_tokens=8))
    assert (decision.speculate, decision.drafter, decision.max_draft_tokens) == (True, Drafter.MODEL, 8)
    assert decision.reason is Reason.REQUEST
    assert evaluate(policy, context(drafter=Drafter.NGRAM)).max_draft_tokens == 5


def test_the_hard_limit_holds_for_everyone() -> None:
    assert evaluate(SpeculationPolicy(), context(max_draft_tokens=1000)).max_draft_tokens == MAX_DRAFT_TOKENS


@pytest.mark.parametrize(
    ("policy", "override", "reason"),
    [
        (SpeculationPolicy(enabled=False), {}, Reason.DISABLED),
        (SpeculationPolicy(drafter=Drafter.NONE), {}, Reason.DISABLED),
        (SpeculationPolicy(), {"enabled": False}, Reason.DISABLED_BY_REQUEST),
        (SpeculationPolicy(), {"drafter": Drafter.NONE}, Reason.DISABLED_BY_REQUEST),
    ],
)
def test_off_is_off_and_says_who_turned_it_off(
    policy: SpeculationPolicy, override: dict[str, Any], reason: Reason
) -> None:
    decision = evaluate(policy, context(**override))
    assert (decision.speculate, decision.drafter, decision.max_draft_tokens) == (False, Drafter.NONE, 0)
    assert decision.reason is reason


def test_a_request_may_turn_on_what_is_off_by_default() -> None:
    assert evaluate(SpeculationPolicy(enabled=False), context(enabled=True)).speculate


def test_a_drafter_that_is_not_there_means_plain_decoding() -> None:
    decision = evaluate(SpeculationPolicy(), context(NO_MODEL, drafter=Drafter.MODEL))
    assert (decision.speculate, decision.reason) == (False, Reason.NO_DRAFTER)
