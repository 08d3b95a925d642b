"""What the speculation policy decides, and why."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.control.bucketing import bucket
from cluster.control.policy import Decision, PolicyContext, Reason, evaluate
from cluster.messages.request import Drafter, SpeculationOverride
from tests.policies import default_only, default_settings, policy

pytestmark = pytest.mark.unit

ALL = frozenset({Drafter.MODEL, Drafter.NGRAM})
NO_MODEL = frozenset({Drafter.NGRAM})
OFF = {"default": default_settings(enabled=False)}


def context(available: frozenset[Drafter] = ALL, **override: Any) -> PolicyContext:
    return PolicyContext("m", override=SpeculationOverride(**override), available=available)


def user_in(low: int, high: int) -> PolicyContext:
    """A context whose user has a bucket in low … high - 1."""
    user = next(user for user in map(str, range(10**6)) if low <= bucket("v1", user) < high)
    return PolicyContext("m", user=user, available=ALL)


def summary(decision: Decision) -> tuple[bool, str, Reason, str | None]:
    return decision.speculate, decision.variant, decision.reason, decision.rule


# --- without rules ---------------------------------------------------------------------------------------------------


def test_auto_prefers_the_draft_model_and_falls_back_to_n_grams() -> None:
    defaults = default_only(version=3)
    assert evaluate(defaults, context()).drafter is Drafter.MODEL
    assert evaluate(defaults, context(NO_MODEL)).drafter is Drafter.NGRAM
    assert evaluate(defaults, context()).policy_version == 3
    assert summary(evaluate(defaults, context())) == (True, "default", Reason.DEFAULT, None)


def test_a_request_overrides_what_it_names_and_nothing_else() -> None:
    decision = evaluate(default_only(), context(max_draft_tokens=8))
    assert (decision.speculate, decision.drafter, decision.max_draft_tokens) == (True, Drafter.MODEL, 8)
    assert decision.reason is Reason.REQUEST
    assert evaluate(default_only(), context(drafter=Drafter.NGRAM)).max_draft_tokens == 5


def test_the_hard_limit_holds_for_everyone() -> None:
    assert evaluate(default_only(), context(max_draft_tokens=1000)).max_draft_tokens == 32


@pytest.mark.parametrize(
    ("enabled", "override", "reason"),
    [
        (False, {}, Reason.DISABLED),
        (False, {"drafter": Drafter.NGRAM}, Reason.DISABLED),
        (True, {"enabled": False}, Reason.DISABLED_BY_REQUEST),
        (True, {"drafter": Drafter.NONE}, Reason.DISABLED_BY_REQUEST),
    ],
)
def test_off_is_off_and_says_who_turned_it_off(enabled: bool, override: dict[str, Any], reason: Reason) -> None:
    decision = evaluate(default_only(enabled=enabled), context(**override))
    assert (decision.speculate, decision.drafter, decision.max_draft_tokens) == (False, Drafter.NONE, 0)
    assert decision.reason is reason


def test_a_request_may_turn_on_what_is_off_by_default() -> None:
    assert evaluate(default_only(enabled=False), context(enabled=True)).speculate


def test_a_drafter_that_is_not_there_means_plain_decoding_in_the_same_cohort() -> None:
    rule = {"action": "allow", "effect": {"drafter": "model"}}
    decision = evaluate(policy(rule), context(NO_MODEL))
    assert summary(decision) == (False, "canary", Reason.NO_DRAFTER, "rule-0")


# --- rules -----------------------------------------------------------------------------------------------------------


def test_a_percentage_divides_requests_into_two_cohorts() -> None:
    half = policy({"action": "allow", "percent": 50}, **OFF)
    assert summary(evaluate(half, user_in(0, 5000))) == (True, "canary", Reason.RULE, "rule-0")
    assert summary(evaluate(half, user_in(5000, 10_000))) == (False, "control", Reason.OUTSIDE_PERCENT, "rule-0")


def test_the_control_cohort_gets_the_default_or_plain_decoding() -> None:
    def control(arm: str) -> Decision:
        return evaluate(policy({"action": "allow", "percent": 50, "control": arm}), user_in(5000, 10_000))

    assert summary(control("default")) == (True, "control", Reason.OUTSIDE_PERCENT, "rule-0")
    assert summary(control("plain")) == (False, "control", Reason.OUTSIDE_PERCENT, "rule-0")


def test_nobody_asks_their_way_into_a_percentage_or_past_a_deny() -> None:
    asks = context(enabled=True)
    assert not evaluate(policy({"action": "allow", "percent": 0}, **OFF), asks).speculate
    assert not evaluate(policy({"action": "allow", "percent": 0, "control": "plain"}), asks).speculate
    assert not evaluate(policy({"action": "deny"}), asks).speculate


def test_a_deny_wins_wherever_it_stands() -> None:
    allow, deny = {"action": "allow"}, {"action": "deny", "match": {"models": ["m"]}}
    for rules in ((allow, deny), (deny, allow)):
        decision = evaluate(policy(*rules), context())
        assert (decision.speculate, decision.variant, decision.reason) == (False, "off", Reason.DENIED)


def test_the_first_allow_that_lets_a_request_in_decides() -> None:
    rules = (
        {"action": "allow", "percent": 10, "variant": "first"},
        {"action": "allow", "percent": 20, "variant": "second", "effect": {"max_draft_tokens": 2}},
        {"action": "allow", "percent": 30, "variant": "third"},
    )
    variants = [evaluate(policy(*rules), user_in(low, low + 1000)).variant for low in (0, 1000, 2000, 3000)]
    assert variants == ["first", "second", "third", "control"]
    assert evaluate(policy(*rules), user_in(3000, 10_000)).rule == "rule-0"


def test_what_a_rule_names_binds_and_what_it_leaves_open_is_the_requests() -> None:
    def decide(effect: dict[str, object], **override: Any) -> tuple[Drafter, int]:
        decision = evaluate(policy({"action": "allow", "effect": effect}), context(**override))
        return decision.drafter, decision.max_draft_tokens

    assert decide({}) == (Drafter.MODEL, 5)
    assert decide({"drafter": "ngram", "max_draft_tokens": 9}) == (Drafter.NGRAM, 9)
    assert decide({"drafter": "ngram"}, drafter=Drafter.MODEL) == (Drafter.NGRAM, 5)
    assert decide({"max_draft_tokens": 9}, max_draft_tokens=20) == (Drafter.MODEL, 9)
    assert decide({"max_draft_tokens": 9}, max_draft_tokens=2, drafter=Drafter.NGRAM) == (Drafter.NGRAM, 2)


@pytest.mark.parametrize(
    ("kill", "reason"),
    [
        ({"all": True}, Reason.KILLED),
        ({"models": ["x", "m"]}, Reason.KILLED_MODEL),
        ({"tenants": ["default"]}, Reason.KILLED_TENANT),
        ({"draft_versions": ["d1"]}, Reason.KILLED_DRAFT_VERSION),
        ({"models": ["x"], "tenants": ["x"], "draft_versions": ["x"]}, Reason.RULE),
    ],
)
def test_a_kill_beats_rules_and_requests_for_those_it_names(kill: dict[str, object], reason: Reason) -> None:
    killed = policy({"action": "allow"}, kill=kill)
    decision = evaluate(killed, PolicyContext("m", draft_version="d1", override=SpeculationOverride(enabled=True)))
    assert (decision.speculate, decision.reason) == (reason is Reason.RULE, reason)


@pytest.mark.parametrize(
    ("key", "same", "different"),
    [
        ("user", {"user": "u"}, {"session": "s", "tenant": "t"}),
        ("session", {"session": "s"}, {"user": "u", "tenant": "t"}),
        ("tenant", {"tenant": "t"}, {"user": "u", "session": "s"}),
    ],
)
def test_requests_of_one_targeting_key_stay_together(key: str, same: dict[str, Any], different: dict[str, Any]) -> None:
    keyed = policy(targeting_key=key)

    def buckets(fields: dict[str, Any]) -> set[int]:
        return {evaluate(keyed, PolicyContext("m", request_id=str(i), **fields)).bucket for i in range(20)}

    assert buckets(same) == {bucket("v1", next(iter(same.values())))}
    assert len(buckets(different)) == (1 if key == "tenant" else 20)  # a request always has a tenant
