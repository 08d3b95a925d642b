"""What `speculation on` and `speculation off` make of a policy document."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.applicable import ROOM_BYTES, ROOM_ENTRIES, check_applicable, check_room
from cluster.control.document import MAX_NAMES, MAX_RULES, SCHEMA, DocumentError, PolicyDocument, parse_document
from cluster.control.document_text import MAX_DOCUMENT_BYTES
from cluster.control.policy import Decision, PolicyContext, Reason, SpeculationPolicy, evaluate
from cluster.control.switch import SpeculationSwitch, as_text, as_yaml, switched

pytestmark = pytest.mark.unit

EMPTY = parse_document({"schema": SCHEMA})
OFF_BY_DEFAULT = parse_document({"schema": SCHEMA, "default": {"enabled": False}})

names = st.sampled_from([None, "a", "b"])
switches = st.builds(SpeculationSwitch, st.booleans(), names, names, names)


def decide(
    document: PolicyDocument, model: str = "a", tenant: str = "a", version: str = "a", user: str = "u"
) -> Decision:
    context = PolicyContext(model, tenant, draft_version=version, user=user)
    return evaluate(SpeculationPolicy.of(document, 1), context)


def test_off_for_everything_is_the_kill_switch() -> None:
    off = switched(EMPTY, SpeculationSwitch(False))
    assert decide(off).reason is Reason.KILLED
    assert switched(off, SpeculationSwitch(True)) == EMPTY


def wide(letter: str, num_rules: int) -> PolicyDocument:
    """A document of that many rules of about 500 bytes each in canonical form, and half as much again as YAML."""
    tenants = [letter * 5 + str(number) for number in range(40)]
    rules = [{"id": f"r{i}", "action": "allow", "percent": 5, "match": {"tenants": tenants}} for i in range(num_rules)]
    return parse_document({"schema": SCHEMA, "rules": rules})


@pytest.mark.parametrize("letter", ["a", "字"], ids=["ascii", "wide"])
def test_the_kill_switch_fits_into_every_document_that_can_be_applied(letter: str) -> None:
    limit = MAX_DOCUMENT_BYTES - ROOM_BYTES
    size = len(wide(letter, 100).canonical_json().encode()) / 100
    document = wide(letter, int(limit / size * 0.999))
    check_room(document)
    assert len(as_yaml(document).encode()) > MAX_DOCUMENT_BYTES  # which is why it is not written as YAML
    longest = "\U0001f600" * 128
    for switch in (SpeculationSwitch(False), SpeculationSwitch(False, longest, "x" * 64, longest)):
        off = switched(document, switch)
        assert parse_document(as_text(off)) == off
    full = wide(letter, min(1000, int(limit / size * 1.005)))
    with pytest.raises(DocumentError, match="no room for switches"):
        check_room(full)


def test_the_kill_switch_fits_into_the_longest_lists_that_can_be_applied() -> None:
    names = [f"n{number}" for number in range(MAX_NAMES - ROOM_ENTRIES)]
    rules = [{"id": f"r{number}", "action": "deny"} for number in range(MAX_RULES - ROOM_ENTRIES)]
    kill = {"models": names, "tenants": names, "draft_versions": names}
    document = parse_document({"schema": SCHEMA, "kill": kill, "rules": rules})
    check_room(document)
    with pytest.raises(DocumentError, match="no room for switches"):  # only what turns something off may use it
        switched(document, SpeculationSwitch(True, model="m", tenant="another", percent=5))
    for number in range(ROOM_ENTRIES):
        document = switched(document, SpeculationSwitch(False, tenant=f"new{number}"))
        document = switched(document, SpeculationSwitch(False, model="m", tenant=f"new{number}"))
    with pytest.raises(DocumentError) as failure:
        check_room(document)
    assert [flaw.path for flaw in failure.value.flaws] == ["rules", "kill.tenants"]


@pytest.mark.parametrize("name", ["zürich", " acme", "acme corp", "a,b", "x" * 65])
def test_a_name_that_no_request_can_have_is_refused_where_it_would_do_nothing(name: str) -> None:
    for switch in (SpeculationSwitch(False, tenant=name), SpeculationSwitch(True, tenant=name, percent=5)):
        with pytest.raises(DocumentError, match=r"^tenant: no request can have .* \(1 to 64 letters"):
            switched(EMPTY, switch)
    killed = parse_document({"schema": SCHEMA, "kill": {"tenants": [name]}})
    match = {"tenants": ["a", name], "workloads": [name], "key_labels": [name], "models": [name]}
    denied = parse_document({"schema": SCHEMA, "rules": [{"id": "r", "action": "deny", "match": match}]})
    for document, paths in (
        (killed, ["kill.tenants"]),
        (denied, [f"rules[0].match.{field}" for field in ("tenants", "workloads", "key_labels")]),
    ):
        with pytest.raises(DocumentError) as failure:
            check_applicable(document)
        assert [flaw.path for flaw in failure.value.flaws] == paths
    assert switched(killed, SpeculationSwitch(True, tenant=name)) == EMPTY


@pytest.mark.parametrize("dimension", ["model", "tenant", "draft_version"])
def test_off_for_one_name_leaves_the_others(dimension: str) -> None:
    switch = SpeculationSwitch(False, **{dimension: "a"})  # type: ignore[arg-type]
    off = switched(EMPTY, switch)
    assert not decide(off).speculate
    assert decide(off, "b", "b", "b").speculate
    assert switched(off, SpeculationSwitch(True, **{dimension: "a"})) == EMPTY  # type: ignore[arg-type]


def test_off_for_a_combination_leaves_its_parts() -> None:
    off = switched(EMPTY, SpeculationSwitch(False, model="a", tenant="a"))
    assert not decide(off, "a", "a").speculate
    assert decide(off, "a", "b").speculate
    assert decide(off, "b", "a").speculate
    assert switched(off, SpeculationSwitch(True, model="a", tenant="a")) == EMPTY


def test_on_where_the_default_is_off_makes_a_rule() -> None:
    on = switched(OFF_BY_DEFAULT, SpeculationSwitch(True, tenant="a"))
    assert decide(on, tenant="a").speculate
    assert not decide(on, tenant="b").speculate


def test_a_percentage_turns_on_that_share_and_turns_off_the_rest() -> None:
    document = switched(EMPTY, SpeculationSwitch(True, tenant="a", percent=25))
    decisions = [decide(document, user=f"user-{number}") for number in range(4000)]
    assert 0.22 < sum(decision.speculate for decision in decisions) / len(decisions) < 0.28
    assert decide(document, tenant="b").speculate


def test_a_later_percentage_replaces_the_earlier_one_and_moves_nobody_out() -> None:
    document = switched(EMPTY, SpeculationSwitch(True, percent=10))
    wider = switched(document, SpeculationSwitch(True, percent=50))
    assert len(wider.rules) == 1
    for number in range(500):
        user = f"user-{number}"
        assert decide(wider, user=user).speculate or not decide(document, user=user).speculate


def test_on_says_what_keeps_it_off() -> None:
    off = switched(EMPTY, SpeculationSwitch(False))
    with pytest.raises(DocumentError, match=r"kill\.all"):
        switched(off, SpeculationSwitch(True, tenant="a"))
    off = switched(EMPTY, SpeculationSwitch(False, model="a"))
    with pytest.raises(DocumentError, match=r"kill\.models"):
        switched(off, SpeculationSwitch(True, model="a", tenant="a"))


def test_off_has_no_percentage() -> None:
    with pytest.raises(DocumentError, match="percent"):
        switched(EMPTY, SpeculationSwitch(False, percent=10))


@given(st.lists(switches, max_size=6), switches)
def test_the_last_switch_is_obeyed_or_refused(before: list[SpeculationSwitch], last: SpeculationSwitch) -> None:
    document = EMPTY
    for switch in (*before, last):
        refused = False
        try:
            document = switched(document, switch)
        except DocumentError:
            refused = True
    if not refused:
        decision = decide(document, last.model or "c", last.tenant or "c", last.draft_version or "c")
        if not last.enabled:
            assert not decision.speculate
        elif len(last.names) <= 1:  # a deny of a combination can only be meant by all of its names
            assert decision.speculate
    assert parse_document(as_yaml(document)) == document
