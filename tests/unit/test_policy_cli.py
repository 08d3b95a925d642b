"""`paceline policy`: what it prints, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer.testing

from cluster.cli import app
from cluster.control.bucketing import bucket

pytestmark = pytest.mark.unit

DOCUMENT = """
schema: paceline.policy/v1
rules:
  - {id: no-code, match: {workloads: [code]}, action: deny}
  - id: acme
    match: {tenants: [acme], temperature: {max: 0.5}}
    action: allow
    percent: 50
    effect: {max_draft_tokens: 8}
default: {enabled: false}
"""
INSIDE = next(user for user in map(str, range(100)) if bucket("v1", user) < 5000)
OUTSIDE = next(user for user in map(str, range(100)) if bucket("v1", user) >= 5000)


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(DOCUMENT)
    return path


def run(*arguments: str | Path) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(app, ["policy", *map(str, arguments)])


def explain(document: Path, *options: str) -> str:
    result = run("explain", "--file", document, "--model", "m", "--tenant", "acme", *options)
    assert result.exit_code == 0, result.output
    return result.output


def test_explain_names_the_bucket_each_rule_and_the_decision(document: Path) -> None:
    output = explain(document, "--user", INSIDE, "--temperature", "0.5")
    assert f"{bucket('v1', INSIDE)} of 10000, of user '{INSIDE}'" in output
    assert "no-code: deny, does not match: workload 'default' is not 'code'" in output
    assert "acme: allow, matches, inside 50 %" in output
    assert "speculate with model, at most 8 guesses" in output
    assert "variant   canary" in output
    assert "reason    rule (rule acme)" in output


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (["--user", OUTSIDE, "--temperature", "0"], ["acme: allow, matches, outside 50 %", "variant   control"]),
        (["--user", INSIDE], ["does not match: temperature 1 is above 0.5", "reason    disabled"]),
        (["--user", INSIDE, "--workload", "code"], ["no-code: deny, matches", "reason    denied (rule no-code)"]),
        (["--request-id", INSIDE, "--temperature", "0"], ["(the request has no user)", "variant   canary"]),
        (["--user", INSIDE, "--temperature", "0", "--no-draft-ready"], ["speculate with ngram"]),
        (["--user", INSIDE, "--temperature", "0", "--asks-off"], ["plain decoding", "disabled_by_request"]),
        (["--user", INSIDE, "--asks-on", "--asks-drafter", "ngram"], ["speculate with ngram, at most 5"]),
    ],
)
def test_explain_says_why_not(document: Path, options: list[str], lines: list[str]) -> None:
    output = explain(document, *options)
    assert all(line in output for line in lines), output


def test_explain_is_json_for_programs(document: Path) -> None:
    report = json.loads(explain(document, "--user", INSIDE, "--temperature", "0", "--json"))
    assert report["bucket"] == bucket("v1", INSIDE)
    assert report["decision"]["rule"] == "acme"
    assert [rule["matches"] for rule in report["rules"]] == [False, True]


def test_check_accepts_a_good_document(document: Path) -> None:
    result = run("check", document)
    assert result.exit_code == 0
    assert "2 rules, digest " in result.output


def test_check_refuses_what_would_leave_no_room_for_a_switch(tmp_path: Path) -> None:
    path = tmp_path / "full.yaml"
    rules = "".join(f"- {{id: r{n}, action: deny}}\n" for n in range(985))
    path.write_text("schema: paceline.policy/v1\nrules:\n" + rules)
    result = run("check", path)
    assert (result.exit_code, "985 rules leave no room" in result.output) == (1, True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            b"schema: paceline.policy/v1\nrules: [{id: a, action: maybe, percent: 101}]",
            ["rules[0].action", "at most 100"],
        ),
        (b"a: \xff", ["byte 3 is not UTF-8"]),
        (b"x" * 300_000, ["at most 262144 bytes"]),
    ],
)
def test_check_lists_the_flaws_of_a_bad_one(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    for result in (run("check", path), run("explain", "--file", path)):
        assert result.exit_code == 1
        assert all(word in result.output for word in words), result.output


def test_a_missing_file_and_a_user_that_is_no_text_are_said(document: Path, tmp_path: Path) -> None:
    assert "cannot read" in run("check", tmp_path / "none").output
    result = run("explain", "--file", document, "--user", "\udcff")
    assert (result.exit_code, "not Unicode text" in result.output) == (1, True)
