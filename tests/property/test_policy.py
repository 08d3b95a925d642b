"""Invariants of any policy document and any request."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control.bucketing import bucket, in_percent
from cluster.control.document import DocumentError, Flaw, Match, RuleAction, parse_document
from cluster.control.explain import explain
from cluster.control.policy import Decision, PolicyContext, Reason, SpeculationPolicy, evaluate
from cluster.messages.request import Drafter, SpeculationOverride
from cluster.router.policy_source import PolicySource
from tests.policies import CONTEXTS, default_only, documents

pytestmark = pytest.mark.property

KILLS = {Reason.KILLED, Reason.KILLED_MODEL, Reason.KILLED_TENANT, Reason.KILLED_DRAFT_VERSION}


def policy_of(values: dict[str, Any]) -> SpeculationPolicy:
    return SpeculationPolicy.of(parse_document(values), 7)


def matches(match: Match, context: PolicyContext) -> bool:
    """What a `match` section means, said as plainly as possible."""

    def has(names: tuple[str, ...] | None, value: str | None) -> bool:
        return names is None or value in names

    def within(limits: Any, value: float) -> bool:
        low, high = (None, None) if limits is None else (limits.min, limits.max)
        return (low is None or low <= value) and (high is None or value <= high)

    return (
        has(match.tenants, context.tenant)
        and has(match.models, context.model)
        and has(match.workloads, context.workload)
        and has(match.key_labels, context.key_label)
        and has(match.draft_versions, context.draft_version)
        and within(match.temperature, context.temperature)
        and within(match.prompt_tokens, context.prompt_tokens)
    )


@settings(max_examples=200)
@given(documents(), CONTEXTS)
def test_deny_beats_allow_beats_percent_beats_default(values: dict[str, Any], context: PolicyContext) -> None:
    policy = policy_of(values)
    decision = evaluate(policy, context)
    matching = [rule for rule in policy.document.rules if matches(rule.match, context)]
    denying = [rule.id for rule in matching if rule.action is RuleAction.DENY]
    allowing = [rule for rule in matching if rule.action is RuleAction.ALLOW]
    inside = [rule for rule in allowing if in_percent(decision.bucket, rule.percent)]
    expected: tuple[str | None, str]
    if "c" in (context.tenant, context.model, context.draft_version) and decision.reason in KILLS:
        expected = (None, "off")
    elif denying:
        expected = (denying[0], "off")
    elif context.override.enabled is False or context.override.drafter is Drafter.NONE:
        expected = (None, "off")
    elif inside:
        expected = (inside[0].id, inside[0].variant)
    elif allowing:
        expected = (allowing[0].id, "control")
    else:
        expected = (None, "default")
    assert (decision.rule, decision.variant) == expected


@settings(max_examples=200)
@given(documents(), CONTEXTS)
def test_a_decision_is_deterministic_and_whole(values: dict[str, Any], context: PolicyContext) -> None:
    policy = policy_of(values)
    decision = evaluate(policy, context)
    assert decision == evaluate(policy_of(copy.deepcopy(values)), replace(context))
    assert isinstance(decision.reason, Reason)
    assert decision.policy_version == 7
    assert decision.speculate == (decision.drafter is not Drafter.NONE) == (decision.max_draft_tokens > 0)
    assert decision.drafter in {Drafter.NONE, *context.available}
    assert 0 <= decision.max_draft_tokens <= 32
    assert 0 <= decision.bucket < 10_000


@given(documents(), CONTEXTS)
def test_an_explanation_agrees_with_the_decision(values: dict[str, Any], context: PolicyContext) -> None:
    policy = policy_of(values)
    explanation = explain(policy, context)
    assert explanation.decision == evaluate(policy, context)
    for finding in explanation.findings:
        assert finding.matches == matches(finding.rule.match, context)
        assert finding.inside in (None, in_percent(explanation.decision.bucket, finding.rule.percent))
    assert (explanation.kill is not None) == (explanation.decision.reason in KILLS)


@given(documents(), CONTEXTS)
def test_a_request_always_turns_itself_off_and_never_on_where_the_policy_holds_it_off(
    values: dict[str, Any], context: PolicyContext
) -> None:
    def decide(enabled: bool | None) -> Decision:
        override = SpeculationOverride(enabled=enabled)
        return evaluate(policy_of(values), replace(context, override=override))

    assert not decide(False).speculate
    if decide(None).reason in {Reason.DENIED, Reason.OUTSIDE_PERCENT, *KILLS}:
        assert decide(True).speculate == decide(None).speculate


@settings(max_examples=200)
@given(documents(), CONTEXTS, st.integers(0, 10_000), st.integers(0, 10_000))
def test_raising_a_percentage_moves_nobody_out(
    values: dict[str, Any], context: PolicyContext, one: int, other: int
) -> None:
    context = replace(context, override=SpeculationOverride())

    def let_in(hundredths: int) -> bool:
        rule = {"id": "raised", "action": "allow", "percent": hundredths / 100, "variant": "raised"}
        rules: list[Any] = [rule, *(r for r in values["rules"] if r["action"] == "deny")]
        return evaluate(policy_of(values | {"rules": rules}), context).variant == "raised"

    assert let_in(min(one, other)) <= let_in(max(one, other))


@given(st.text(max_size=20), st.text(max_size=20))
def test_a_bucket_is_in_range_for_any_text(salt: str, key: str) -> None:
    assert 0 <= bucket(salt, key) < 10_000
    assert bucket(salt, key) == bucket(salt, key)


@given(documents())
def test_a_document_survives_every_way_of_writing_it(values: dict[str, Any]) -> None:
    document = parse_document(values)
    for text in (json.dumps(values), yaml.safe_dump(values), document.canonical_json()):
        assert parse_document(text) == document
        assert parse_document(text).digest() == document.digest()


# --- bad documents ---------------------------------------------------------------------------------------------------

# Whatever field stands there, none of these is a value of it.
BAD_VALUES = (
    -1.5,
    float("nan"),
    float("inf"),
    2**70,
    -(10**30),
    "",
    "\ud800",
    [[]],
    [None],
    {"?": 0},
    {1: 2},
    b"x",
    ...,
)


@dataclass(frozen=True)
class Site:
    """A place in a document, and its path as flaws name it."""

    keys: tuple[str | int, ...]

    @property
    def path(self) -> str:
        return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.keys).removeprefix(".")

    def put(self, values: dict[str, Any], value: object) -> dict[str, Any]:
        changed = copy.deepcopy(values)
        holder: Any = changed
        for key in self.keys[:-1]:
            holder = holder[key]
        holder[self.keys[-1]] = value
        return changed


def sites(value: object, keys: tuple[str | int, ...] = ()) -> Iterator[Site]:
    if keys:
        yield Site(keys)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from sites(item, (*keys, key))


def mappings(value: dict[str, Any]) -> list[tuple[str | int, ...]]:
    def at(site: Site) -> object:
        found: Any = value
        for key in site.keys:
            found = found[key]
        return found

    return [(), *(site.keys for site in sites(value) if isinstance(at(site), dict))]


BREAKAGES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=30, max_size=30)


def broken(values: dict[str, Any], where: int, how: int) -> tuple[dict[str, Any], str]:
    """An invalid twin of a valid document, and the path of its flaw."""
    if how % 5 == 0:  # a field that does not exist
        holders = mappings(values)
        site = Site((*holders[where % len(holders)], "no_such_field"))
        return site.put(values, 1), site.path
    places = list(sites(values))
    site = places[where % len(places)]
    return site.put(values, BAD_VALUES[how % len(BAD_VALUES)]), site.path


def test_five_thousand_bad_documents_are_refused_with_the_path_to_the_field() -> None:
    num_refused = 0
    source = PolicySource(good := default_only(version=5))

    @settings(max_examples=180, database=None)
    @given(documents(), BREAKAGES)
    def refuse(values: dict[str, Any], breakages: list[tuple[int, int]]) -> None:
        nonlocal num_refused
        parse_document(values)
        for where, how in breakages:
            bad, path = broken(values, where, how)
            with pytest.raises(DocumentError) as caught:
                source.apply(parse_document(bad), 6)
            assert source.current is good
            assert all(flaw.path and flaw.message for flaw in caught.value.flaws)
            assert any(flaw.path.startswith(path) for flaw in caught.value.flaws), (path, str(caught.value))
            num_refused += 1

    refuse()
    assert num_refused >= 5000


def flaws_of(text: str) -> tuple[Flaw, ...]:
    try:
        parse_document(text)
    except DocumentError as error:
        return error.flaws
    return ()


@settings(max_examples=300)
@given(documents(), st.integers(0, 10**6), st.integers(0, 3), st.text(max_size=3), st.booleans())
def test_a_damaged_text_is_a_document_or_a_document_error(
    values: dict[str, Any], at: int, num_lost: int, inserted: str, as_yaml: bool
) -> None:
    text = yaml.safe_dump(values) if as_yaml else json.dumps(values)
    at %= len(text)
    assert all(flaw.path for flaw in flaws_of(text[:at] + inserted + text[at + num_lost :]))
