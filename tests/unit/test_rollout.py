"""One rollout from start to end, step by step, and its document."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.control import rollout
from cluster.control.analysis import Bound, Compare, Metric, MetricSpec
from cluster.control.cohort import Cohort, Measurement, RequestRecord
from cluster.control.flaws import DocumentError
from cluster.control.rollout import Phase, RolloutCommandError, RolloutState
from cluster.control.rollout_spec import parse_rollout

pytestmark = pytest.mark.unit

TEXT = """
schema: paceline.rollout/v1
target: {rule: faster-draft}
steps:
  - set_percent: 5
  - pause: {seconds: 60}
  - analyse: {window_s: 300, looks: 3}
  - set_percent: 50
  - pause: {}
  - set_percent: 100
conditions:
  - {metric: ttft, at_most: 1.2, min_samples: 50}
  - {metric: error_rate, at_most: 0.05, min_samples: 50}
"""
SPEC = parse_rollout(TEXT)


def measured(state: RolloutState, now: float, ttft_s: float = 1.0, count: int = 400) -> Measurement:
    canary = tuple(RequestRecord(str(n), Cohort.CANARY, now, ttft_s=ttft_s) for n in range(count))
    control = tuple(RequestRecord(str(n), Cohort.CONTROL, now, ttft_s=1.0) for n in range(400))
    return Measurement(state.since, now, canary, control)


def at_analysis() -> RolloutState:
    """5 %, in force since second 10, paused for a minute: the window begins at 70."""
    state = rollout.advance(SPEC, rollout.start(0.0), None, 0.0)
    state = rollout.confirm(state, 1, 10.0)
    return rollout.advance(SPEC, rollout.advance(SPEC, state, None, 10.0), None, 70.0)


def test_a_rollout_from_start_to_end() -> None:
    state = rollout.advance(SPEC, rollout.start(0.0), None, 0.0)
    assert state.pending == rollout.SetPercent(5.0, 1)
    assert rollout.advance(SPEC, state, None, 1e6) == state, "nothing happens before the percentage is in force"
    state = rollout.advance(SPEC, rollout.confirm(state, 1, 10.0), None, 69.0)
    assert (state.phase, state.reason) == (Phase.PAUSED, "paused until 60 s are over")
    state = rollout.advance(SPEC, state, None, 70.0)
    assert (state.phase, state.step_index, state.since) == (Phase.RUNNING, 2, 70.0)
    for now, look in ((170.0, 1), (270.0, 2)):
        assert not rollout.measurement_due(SPEC, state, now - 1.0)
        assert rollout.measurement_due(SPEC, state, now)
        state = rollout.advance(SPEC, state, measured(state, now), now)
        assert (state.step_index, state.looks_done) == (2, look), "a pass ends it at the last look only"
    state = rollout.advance(SPEC, state, measured(state, 370.0), 370.0)
    assert state.pending == rollout.SetPercent(50.0, 2)
    assert state.assessment is not None
    state = rollout.advance(SPEC, rollout.confirm(state, 2, 371.0), None, 1e6)
    assert (state.phase, state.reason) == (Phase.PAUSED, "paused until resumed")
    state = rollout.advance(SPEC, rollout.resume(state, 1e6, "ann"), None, 1e6)
    state = rollout.advance(SPEC, rollout.confirm(state, 3, 1e6), None, 1e6)
    assert (state.phase, state.percent, state.pending) == (Phase.SUCCESSFUL, 100.0, None)


def test_a_bad_canary_is_at_0_percent_after_the_first_look() -> None:
    state = at_analysis()
    state = rollout.advance(SPEC, state, measured(state, 170.0, ttft_s=2.0), 170.0)
    assert (state.phase, state.pending) == (Phase.FAILED, rollout.SetPercent(0.0, 2))
    assert state.reason == "ttft P50: ratio 2 [2, 2] is not at most 1.2"
    state = rollout.confirm(state, 2, 171.0)
    assert rollout.advance(SPEC, state, measured(state, 500.0), 500.0) == state
    for command in (rollout.resume, rollout.abort):
        with pytest.raises(RolloutCommandError, match="a rollout that is failed cannot be"):
            command(state, 600.0, "ann")
    with pytest.raises(RolloutCommandError, match="cannot be promoted"):
        rollout.promote(SPEC, state, 600.0, "ann")


def test_too_few_samples_hold_the_rollout_until_it_is_resumed_and_measured_afresh() -> None:
    state = at_analysis()
    state = rollout.advance(SPEC, state, measured(state, 370.0, count=10), 370.0)
    assert (state.phase, state.percent, state.pending) == (Phase.INCONCLUSIVE, 5.0, None)
    assert "10 canary and 400 control samples, 50 needed" in state.reason
    assert rollout.advance(SPEC, state, measured(state, 1e6), 1e6) == state
    state = rollout.resume(state, 400.0, "ann")
    assert (state.phase, state.since, state.looks_done) == (Phase.RUNNING, 400.0, 0)
    state = rollout.advance(SPEC, state, measured(state, 700.0), 700.0)
    assert state.percent == 50.0


def test_an_analysis_waits_for_a_measurement_of_its_own_window() -> None:
    state = at_analysis()
    assert rollout.advance(SPEC, state, None, 1e6) == state
    early = Measurement(state.since - 1.0, 370.0, *[measured(state, 370.0).control] * 2)
    assert rollout.advance(SPEC, state, early, 370.0) == state


def test_a_window_whose_samples_are_lost_is_measured_afresh() -> None:
    state = at_analysis()
    state = rollout.advance(SPEC, state, measured(state, 170.0), 170.0)
    again = rollout.measure_afresh(SPEC, state, 200.0)
    assert (again.step_index, again.since, again.looks_done) == (2, 200.0, 0)
    paused = rollout.advance(
        SPEC, rollout.confirm(rollout.advance(SPEC, rollout.start(0.0), None, 0.0), 1, 0.0), None, 0.0
    )
    assert rollout.measure_afresh(SPEC, paused, 200.0) == paused, "only measurements are lost by a restart"


def test_a_pause_by_hand_lasts_until_resumed_wherever_it_is() -> None:
    at_pause = rollout.advance(
        SPEC, rollout.confirm(rollout.advance(SPEC, rollout.start(0.0), None, 0.0), 1, 10.0), None, 20.0
    )
    for state, step_index in ((at_pause, 1), (at_analysis(), 2)):
        held = rollout.pause(state, 100.0, "ann")
        assert (held.phase, held.reason) == (Phase.PAUSED, "paused by ann")
        assert rollout.advance(SPEC, held, measured(held, 1e6, ttft_s=9.0), 1e6) == held
        assert not rollout.measurement_due(SPEC, held, 1e6)
        with pytest.raises(RolloutCommandError, match="cannot be paused"):
            rollout.pause(held, 200.0, "ann")
        resumed = rollout.resume(held, 1e6, "bob")
        assert (resumed.phase, resumed.step_index, resumed.since) == (Phase.RUNNING, step_index, 1e6)
        assert rollout.advance(SPEC, resumed, None, 1e6 + 59.0).step_index == step_index


def test_a_pause_by_hand_before_a_percentage_is_in_force_waits_for_it() -> None:
    held = rollout.pause(rollout.advance(SPEC, rollout.start(0.0), None, 0.0), 1.0, "ann")
    assert held.pending == rollout.SetPercent(5.0, 1)
    held = rollout.confirm(held, 1, 2.0)
    assert rollout.advance(SPEC, held, None, 1e6) == held
    assert rollout.abort(held, 3.0, "ann").is_held is False


def test_stepping_aside_leaves_the_percentage_to_others() -> None:
    aside = rollout.step_aside(at_analysis(), 80.0, "rule r is gone")
    assert (aside.phase, aside.pending, aside.percent, aside.reason) == (Phase.ABORTED, None, 5.0, "rule r is gone")
    promoted = rollout.promote(SPEC, at_analysis(), 80.0, "ann")
    assert rollout.step_aside(promoted, 81.0, "edited").phase is Phase.ABORTED
    with pytest.raises(RolloutCommandError):
        rollout.step_aside(aside, 90.0, "again")


def test_abort_and_promote_by_hand() -> None:
    aborted = rollout.abort(at_analysis(), 80.0, "ann")
    assert (aborted.phase, aborted.pending, aborted.reason) == (
        Phase.ABORTED, rollout.SetPercent(0.0, 2), "aborted by ann",
    )  # fmt: skip
    promoted = rollout.promote(SPEC, at_analysis(), 80.0, "ann")
    assert (promoted.phase, promoted.pending) == (Phase.SUCCESSFUL, rollout.SetPercent(100.0, 2))
    with pytest.raises(RolloutCommandError, match="running cannot be resumed"):
        rollout.resume(at_analysis(), 80.0, "ann")


def test_an_abort_replaces_a_percentage_that_is_not_in_force_yet() -> None:
    state = rollout.abort(rollout.advance(SPEC, rollout.start(0.0), None, 0.0), 1.0, "ann")
    assert state.pending == rollout.SetPercent(0.0, 2)
    assert rollout.confirm(state, 1, 2.0) == state


def test_a_state_survives_as_json() -> None:
    state = at_analysis()
    state = rollout.advance(SPEC, state, measured(state, 370.0, count=10), 370.0)
    assert rollout.from_json(rollout.to_json(state)) == state
    for text in ("", "{}x", '{"phase": "sleeping"}', '{"phase": "running", "step_index": "1"}'):
        with pytest.raises(ValueError):
            rollout.from_json(text)


# --- the document ----------------------------------------------------------------------------------------------------


def test_conditions_become_metric_specs() -> None:
    assert SPEC.metric_specs() == (
        MetricSpec(Metric.TTFT, 1.2, Bound.AT_MOST, Compare.RATIO, min_samples=50),
        MetricSpec(Metric.ERROR_RATE, 0.05, Bound.AT_MOST, Compare.DIFFERENCE, min_samples=50),
    )
    at_least = {"metric": "acceptance_length", "at_least": 1.5, "compare": "canary", "quantile": 0.25}
    spec = parse_rollout(document(conditions=[at_least]))
    assert spec.metric_specs() == (
        MetricSpec(Metric.ACCEPTANCE_LENGTH, 1.5, Bound.AT_LEAST, Compare.CANARY, quantile=0.25),
    )


def document(**changes: object) -> dict[str, object]:
    whole: dict[str, object] = {
        "schema": "paceline.rollout/v1",
        "target": {"rule": "r"},
        "steps": [{"set_percent": 5}, {"analyse": {"window_s": 60}}],
        "conditions": [{"metric": "ttft", "at_most": 1.1}],
    }
    return {key: value for key, value in {**whole, **changes}.items() if value is not None}


TTFT: dict[str, Any] = {"metric": "ttft"}


@pytest.mark.parametrize(
    ("changes", "flaw"),
    [
        ({"schema": "paceline.rollout/v2"}, "schema: "),
        ({"target": {}}, "target: should have either rule or match"),
        ({"target": {"rule": "r", "match": {"tenants": ["acme"]}}}, "target: should have either rule or match"),
        ({"target": {"match": {"tenant": ["acme"]}}}, "target.match.tenant: unknown field"),
        ({"steps": []}, "steps: "),
        ({"steps": [{"set_percent": 1}] * 101}, "steps: "),
        ({"steps": [{}]}, r"steps\[0\]: should have exactly one of"),
        ({"steps": [{"set_percent": 1, "pause": {}}]}, r"steps\[0\]: should have exactly one of"),
        ({"steps": [{"set_percent": 101}]}, r"steps\[0\].set_percent: .*at most 100"),
        ({"steps": [{"set_percent": 1.005}]}, r"steps\[0\].set_percent: has more than two decimals"),
        ({"steps": [{"pause": {"seconds": 0}}]}, r"steps\[0\].pause.seconds: .*above 0"),
        ({"steps": [{"set_percent": 5}, {"analyse": {"window_s": 60, "looks": 21}}]}, r"steps\[1\].analyse.looks: "),
        ({"steps": [{"analyse": {"window_s": 60}}]}, r"steps\[0\].analyse: .*one cohort while the percentage is 0"),
        ({"steps": [{"set_percent": 100}, {"analyse": {"window_s": 60}}]}, r"steps\[1\].analyse: .*percentage is 100"),
        ({"conditions": []}, r"steps\[1\].analyse: there are no conditions to check"),
        ({"conditions": [TTFT]}, r"conditions\[0\]: should have either at_most or at_least"),
        ({"conditions": [{**TTFT, "at_most": 1, "at_least": 1}]}, r"conditions\[0\]: should have either"),
        ({"conditions": [{"metric": "speed", "at_most": 1}]}, r"conditions\[0\].metric: "),
        ({"conditions": [{**TTFT, "at_most": 1, "quantile": 1}]}, r"conditions\[0\].quantile: .*at most 0.99"),
        ({"conditions": [{**TTFT, "at_most": 1, "min_samples": 5000}]}, r"conditions\[0\].min_samples: .*at most 4096"),
        ({"conditions": [{**TTFT, "at_most": float("nan")}]}, r"conditions\[0\].at_most: should be a finite number"),
    ],
)
def test_a_flaw_is_reported_with_its_path(changes: dict[str, object], flaw: str) -> None:
    parse_rollout(document())
    with pytest.raises(DocumentError, match=f"^{flaw}"):
        parse_rollout(document(**changes))
