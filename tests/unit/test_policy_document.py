"""What a policy document may say; everything else is refused with the path to it."""

from __future__ import annotations

import pytest

from cluster.control.access import parse_access
from cluster.control.document import SCHEMA, DocumentError, parse_document
from cluster.control.document_text import MAX_DOCUMENT_BYTES
from tests.policies import document_values

pytestmark = pytest.mark.unit

FULL = """
schema: paceline.policy/v1
salt: 2026-11-01                 # a date in YAML, a string here
targeting_key: session
kill: {all: false, models: [m1], tenants: [t1], draft_versions: [d0]}
rules:
  - id: no-code
    match: {workloads: [code], key_labels: [batch]}
    action: deny
  - id: acme
    match:
      tenants: [acme]
      models: [smollm2-135m]
      draft_versions: [d1]
      temperature: {min: 0, max: 0.7}
      prompt_tokens: {max: 2048}
    action: allow
    percent: 12.5
    variant: wide
    control: plain
    effect: {drafter: model, max_draft_tokens: 8, acceptance: equal}
default: {enabled: false, drafter: ngram, max_draft_tokens: 3}
"""


def flaws_of(source: str | dict[str, object]) -> dict[str, str]:
    with pytest.raises(DocumentError) as caught:
        parse_document(source)
    return {flaw.path: str(flaw) for flaw in caught.value.flaws}


def test_a_full_document_says_what_it_says_in_yaml_in_json_and_as_values() -> None:
    document = parse_document(FULL)
    assert document.salt == "2026-11-01"
    assert document.rules[1].basis_points == 1250
    assert document.rules[1].match.tenants == ("acme",)
    assert not document.default.enabled
    again = parse_document(document.canonical_json())
    assert (again, again.digest()) == (document, document.digest())


def test_the_digest_is_of_the_meaning() -> None:
    short = parse_document(f"schema: {SCHEMA}\nrules: [{{id: a, action: allow, percent: 5}}]")
    long = parse_document(
        f'{{"default": {{"enabled": true}}, "rules": [{{"action": "allow", "percent": 5.0, "id": "a"}}],'
        f' "salt": "v1", "schema": "{SCHEMA}"}}'
    )
    other = parse_document(f"schema: {SCHEMA}\nrules: [{{id: a, action: allow, percent: 6}}]")
    assert short.digest() == long.digest() != other.digest()


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("", "document", "object"),
        ("- a", "document", "object"),
        ("a: b: c", "document", "line 1"),
        ("{", "document", "not JSON: line 1"),
        ('{"schema": 1} x', "document", "Extra data"),
        ("a: 1\n---\nb: 2", "document", "another document"),
        ("a: \x01", "document", "control characters"),
        ("\udc80", "document", "not Unicode"),
        ("a: " + "x" * MAX_DOCUMENT_BYTES, "document", "at most 262144 bytes"),
        ("[" * 50 + "]" * 50, "document", "at most 16 levels"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "document", "at most 16 levels"),
        ('{"a":' * 30 + "1" + "}" * 30, "a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a", "at most 16 levels"),
        ("a: &x [1]\nb: [*x, *x]", "b[0]", "aliases"),
        ("a: &x {b: *x}", "a.b", "aliases"),
        ("salt: a\nsalt: b", "salt", "twice"),
        ('{"kill": {"all": true, "all": false}}', "kill.all", "twice"),
        ("1: a", "1", "a key should be a string"),
        ("true: a", "True", "a key should be a string"),
        ("? [a]\n: b", "?", "a key should be a string"),
        ("<<: {salt: a}", "<<", "unknown field"),
        ("a: .nan", "a", "finite"),
        ('{"a": NaN}', "a", "finite"),
        ('{"a": 1e999}', "a", "finite"),
        ('{"a": ' + "9" * 10_000 + "}", "a", "64 bits"),
        ("a: " + "9" * 10_000, "a", "64 bits"),
        ("a: -9223372036854775809", "a", "64 bits"),
        ('{"a": "\\ud800"}', "a", "not Unicode"),
        ('{"\\ud800": 1}', "\\ud800", "a key should be a string"),
        ("a: !!python/object/apply:os.system [x]", "a", "tag"),
        ("a: !!binary aGk=", "a", "tag"),
        ("a: !!set {b}", "a", "tag"),
        ("a: !!int x", "a", "no plain decimal number"),
        ("a: 1:30", "a", "'1:30' is no plain decimal number"),
        ("a: 1:30.5", "a", "no plain decimal number"),
        ("a: 010", "a", "no plain decimal number"),
        ("a: 0x10", "a", "no plain decimal number"),
        ("a: 0b1", "a", "no plain decimal number"),
        ("a: 1_0", "a", "no plain decimal number"),
        ("a: 1_0.5", "a", "no plain decimal number"),
        ("a: yes", "a", "true or false"),
        ("a: [on, Off, N, no]", "a[3]", "'no' may be a word"),
        ("kill: {tenants: [123]}", "kill.tenants[0]", "quotes"),
    ],
)
def test_a_text_that_could_be_misread_is_refused(text: str, path: str, words: str) -> None:
    assert words in flaws_of(text)[path]


def test_a_list_is_not_also_too_short_for_what_is_wrong_inside() -> None:
    assert set(flaws_of(f"schema: {SCHEMA}\nkill: {{tenants: [1]}}")) == {"kill.tenants[0]"}
    assert set(flaws_of(f"schema: {SCHEMA}\nkill: {{tenants: []}}")) == {"kill.tenants"}


def test_a_key_that_is_wrong_has_the_path_of_its_field() -> None:
    with pytest.raises(DocumentError, match=r"^quotas\.tenants\.a b: String should match pattern"):
        parse_access("schema: paceline.access/v1\nquotas: {tenants: {a b: {}}}")


@pytest.mark.parametrize("number", ["0", "5", "+5", "0.5", ".5", "5.", "1.5e+1", "99.99"])
def test_plain_numbers_are_read(number: str) -> None:
    text = f"schema: {SCHEMA}\nrules: [{{id: a, action: allow, percent: {number}}}]"
    assert parse_document(text).rules[0].percent == float(number)


@pytest.mark.parametrize(
    ("fields", "path", "words"),
    [
        ({"schema": "paceline.policy/v2"}, "schema", "one of 'paceline.policy/v1'"),
        ({"colour": "red"}, "colour", "unknown field"),
        ({"salt": ""}, "salt", "at least 1 long"),
        ({"salt": "x" * 129}, "salt", "at most 128 long"),
        ({"salt": "a\nb"}, "salt", "printable"),
        ({"targeting_key": "planet"}, "targeting_key", "one of 'user', 'session' or 'tenant'"),
        ({"kill": {"all": 1}}, "kill.all", "boolean"),
        ({"kill": {"models": []}}, "kill.models", "at least 1 long"),
        ({"kill": {"users": ["u"]}}, "kill.users", "unknown field"),
        ({"default": {"max_draft_tokens": 0}}, "default.max_draft_tokens", "at least 1"),
        ({"default": {"max_draft_tokens": 33}}, "default.max_draft_tokens", "at most 32"),
        ({"default": {"max_draft_tokens": 2.5}}, "default.max_draft_tokens", "integer"),
        ({"default": {"drafter": "none"}}, "default.drafter", "one of auto, model, ngram"),
        ({"default": {"enabled": "yes"}}, "default.enabled", "boolean"),
        ({"rules": {}}, "rules", "array"),
        ({"rules": [{"id": str(i), "action": "deny"} for i in range(1001)]}, "rules", "at most 1000 long"),
        ({"rules": [{"id": i, "action": "deny"} for i in "aba"]}, "rules[2].id", "another rule"),
        ({"rules": [object()]}, "rules[0]", "not a plain value"),
    ],
)
def test_a_bad_field_is_named_with_its_limit(fields: dict[str, object], path: str, words: str) -> None:
    assert words in flaws_of(document_values() | fields)[path]


@pytest.mark.parametrize(
    ("fields", "path", "words"),
    [
        ({"id": "a b"}, "id", "pattern"),
        ({"id": None}, "id", "string"),
        ({"action": "maybe"}, "action", "one of 'allow' or 'deny'"),
        ({"percent": -0.01}, "percent", "at least 0"),
        ({"percent": 100.01}, "percent", "at most 100"),
        ({"percent": 1.001}, "percent", "steps of 0.01"),
        ({"percent": True}, "percent", "number"),
        ({"percent": "5"}, "percent", "number"),
        ({"variant": "control"}, "variant", "reserved"),
        ({"effect": {"drafter": "none"}}, "effect.drafter", "one of auto, model, ngram"),
        ({"effect": {"acceptance": "always"}}, "effect.acceptance", "one of 'equal'"),
        ({"action": "deny", "percent": 5}, "percent", "a deny rule has none"),
        ({"action": "deny", "effect": {}}, "effect", "a deny rule has none"),
        ({"match": {"tenants": "acme"}}, "match.tenants", "array"),
        ({"match": {"tenants": ["acme", 5]}}, "match.tenants[1]", "string"),
        ({"match": {"tenants": ["x" * 129]}}, "match.tenants[0]", "at most 128 long"),
        ({"match": {"temperature": {}}}, "match.temperature", "min, max or both"),
        ({"match": {"temperature": {"min": 1, "max": 0.5}}}, "match.temperature.min", "at most 0.5"),
        ({"match": {"temperature": {"max": 2.1}}}, "match.temperature.max", "at most 2"),
        ({"match": {"prompt_tokens": {"min": 0.5}}}, "match.prompt_tokens.min", "integer"),
        ({"match": {"prompt_tokens": {"max": 2**31}}}, "match.prompt_tokens.max", "below 2147483648"),
        ({"match": {"users": ["u"]}}, "match.users", "unknown field"),
    ],
)
def test_a_bad_field_of_a_rule_is_named_with_its_limit(fields: dict[str, object], path: str, words: str) -> None:
    rules = ({"action": "allow"}, {"action": "allow"} | fields)
    assert words in flaws_of(document_values(*rules))[f"rules[1].{path}"]


def test_every_flaw_is_listed() -> None:
    fields = {"salt": 1, "kill": {"all": None}, "default": {"drafter": "x"}, "rules": [{"id": "a"}, 5]}
    found = flaws_of(document_values() | fields)
    assert set(found) == {"salt", "kill.all", "default.drafter", "rules[0].action", "rules[1]"}


def test_a_missing_schema_is_a_flaw() -> None:
    assert "required" in flaws_of({"salt": "v1"})["schema"]
