"""`paceline rollout …`: what flags are made into, and what is printed."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.cli import rollout as command
from cluster.control.rollout_spec import parse_rollout

pytestmark = pytest.mark.unit

TEXT = """
schema: paceline.rollout/v1
target: {rule: fast}
steps: [{set_percent: 5}, {analyse: {window_s: 300}}, {pause: {}}, {set_percent: 100}]
conditions: [{metric: ttft, at_most: 1.2}]
"""


def item(phase: str = "running", num_events: int = 1) -> dict[str, Any]:
    event = {"at": 0.0, "phase": "running", "step_index": 1, "percent": 5.0, "reason": "5 %"}
    events = [event, {**event, "phase": "failed", "percent": 0.0, "reason": "ttft is not at most 1.2"}]
    result = {"metric": "ttft", "verdict": "fail", "num_canary": 120, "num_control": 2000, "reason": "ratio 2"}
    return {
        "rollout_id": "3f9a1c20", "rule": "fast", "phase": phase, "percent": 5.0, "step_index": 1, "why": "5 %",
        "text": TEXT, "num_canary": 7, "num_control": 93, "verdict": "fail", "results": [result], "started_at": 0.0,
        "is_pending": False, "author": "ann", "events": events[:num_events],
    }  # fmt: skip


class Api:
    """Answers the admin API's calls in order, and keeps them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self._answers = list(answers)
        monkeypatch.setattr(command, "call", self._call)
        monkeypatch.setattr(command, "WATCH_S", 0.0)

    def _call(self, method: str, url: str, path: str, body: Any = None, **params: Any) -> Any:
        self.calls.append((method, path, body))
        return self._answers.pop(0)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["rollout", *arguments])


def test_flags_are_made_into_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(monkeypatch, item())
    limits = ("--at-most", "tpot=1.1", "--at-most", "error_rate=0.02")
    answer = run("start", "--rule", "fast", "--percents", "0,5,100", "--window", "60", "--looks", "2", *limits)
    assert "rollout 3f9a1c20 of rule fast has begun" in answer.output
    method, path, body = api.calls[0]
    assert (method, path) == ("POST", "rollouts")
    expected = {
        "schema": "paceline.rollout/v1",
        "target": {"rule": "fast"},
        "steps": [
            {"set_percent": 0.0},
            {"set_percent": 5.0},
            {"analyse": {"window_s": 60.0, "looks": 2}},
            {"set_percent": 100.0},
        ],
        "conditions": [{"metric": "tpot", "at_most": 1.1}, {"metric": "error_rate", "at_most": 0.02}],
    }
    assert parse_rollout(body["text"]) == parse_rollout(expected)


def test_the_document_of_the_default_flags_is_read_as_it_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(monkeypatch, item())
    assert run("start", "--rule", "fast").exit_code == 0
    spec = parse_rollout(api.calls[0][2]["text"])
    assert [step.set_percent for step in spec.steps if step.set_percent is not None] == [5, 25, 50, 100]
    assert sum(step.analyse is not None for step in spec.steps) == 3


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "either a file or --rule"),
        (("file.yaml", "--rule", "fast"), "either a file or --rule"),
        (("--rule", "fast", "--percents", "5,many"), "--percents: 'many' is not a number"),
        (("--rule", "fast", "--percents", ""), "--percents: '' is not a number"),
        (("--rule", "fast", "--at-most", "ttft"), "--at-most: '' is not a number"),
        (("--rule", "fast", "--percents", "5,101"), "steps[2].set_percent"),
        (("--rule", "fast", "--at-most", "beauty=1"), "conditions[0].metric"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], word: str
) -> None:
    api = Api(monkeypatch)
    answer = run("start", *arguments)
    assert (answer.exit_code, api.calls) == (1, [])
    assert word in answer.output


def test_watching_tells_each_change_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    Api(monkeypatch, item(), item(), item("failed", 2))
    output = run("status", "3f9a1c20", "--watch").output
    assert "→ analyse 300 s (7 canary, 93 control so far)" in output
    assert "✓ 5 %" in output
    assert "pause until resumed" in output
    assert output.count("failed, step 2, 0 %: ttft is not at most 1.2") == 1


def test_watching_waits_while_control_is_away_and_tells_what_it_has_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = [item()["events"][0] | {"at": float(number), "percent": number} for number in range(150)]
    before, after = item() | {"events": [first, *others[:99]]}, item("failed") | {"events": [first, *others[-99:]]}
    Api(monkeypatch, before, None, None, after)
    result = run("status", "3f9a1c20", "--watch")
    assert (result.exit_code, result.stderr.count("control is away")) == (0, 1)
    assert all(result.stdout.count(f"step 2, {number} %") == 1 for number in range(150))


@pytest.mark.parametrize("rollout_id", ["../policy", "..", "", "a/b", "x?y", "x#y", "a b", "ü"])
def test_what_cannot_be_a_rollouts_id_is_not_asked_for(monkeypatch: pytest.MonkeyPatch, rollout_id: str) -> None:
    for name in ("status", "pause", "resume", "promote", "abort"):
        api = Api(monkeypatch)
        result = run(name, "--", rollout_id)
        assert (result.exit_code, "there is no rollout" in result.stderr, api.calls) == (1, True, [])


def test_commands_say_where_the_rollout_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pause", "resume", "promote", "abort"):
        api = Api(monkeypatch, item())
        assert "rollout 3f9a1c20 is running at 5 %" in run(name, "3f9a1c20", "--reason", "why").output
        assert api.calls[0][:2] == ("POST", f"rollouts/3f9a1c20/{name}")
        assert api.calls[0][2]["reason"] == "why"
    Api(monkeypatch, [item()])
    assert "3f9a1c20" in run("list").output
