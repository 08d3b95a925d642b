"""What the store is given of a rollout, however long it goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.control import rollout
from cluster.control.analysis import Assessment, Metric, MetricResult, Verdict
from cluster.control.rollout import RolloutCommand
from cluster.control.rollout_entry import MAX_EVENTS, MAX_SPEC_BYTES, RolloutEntry, from_json, moved, to_json
from cluster.control.rollout_spec import MAX_CONDITIONS, parse_rollout
from cluster.control.store import MAX_NAME_CHARS, MAX_REASON_CHARS, check_text

pytestmark = pytest.mark.unit

SPEC = parse_rollout({
    "schema": "paceline.rollout/v1",
    "target": {"rule": "fast"},
    "steps": [{"set_percent": 5}, {"pause": {}}, {"set_percent": 100}],
})  # fmt: skip
WIDEST = "\U0001f600"


def by_hand(entry: RolloutEntry, num_times: int, by: str) -> RolloutEntry:
    """The entry after somebody has paused and resumed it so many times."""
    for number in range(num_times):
        command = RolloutCommand.PAUSE if number % 2 == 0 else RolloutCommand.RESUME
        entry = moved(entry, rollout.obey(SPEC, entry.state, command, float(number), by), float(number))
    return entry


def test_an_entry_fits_into_the_store_whatever_people_wrote_and_however_often() -> None:
    by = WIDEST * MAX_NAME_CHARS + ": " + WIDEST * MAX_REASON_CHARS
    results = (MetricResult(Metric.TTFT, Verdict.FAIL, "x" * 300, 10**5, 10**5, 1.1, 1.1, 1.1),) * MAX_CONDITIONS
    state = replace(rollout.start(0.0), assessment=Assessment(Verdict.FAIL, "x" * 300 * MAX_CONDITIONS, results))
    spec_text = "\n" * MAX_SPEC_BYTES  # two bytes each, as JSON
    start = RolloutEntry("id", "r" * 128, spec_text, WIDEST * MAX_NAME_CHARS, WIDEST * MAX_REASON_CHARS, 0.0, state)
    entry = by_hand(start, 3 * MAX_EVENTS, by)
    assert len(entry.events) == MAX_EVENTS
    check_text("state", to_json(entry))
    assert from_json(to_json(entry)) == entry


def test_a_short_reason_is_kept_as_it_is() -> None:
    entry = by_hand(RolloutEntry("id", "r", "", "ann", "", 0.0, rollout.start(0.0)), 1, "ann: lunch")
    assert entry.events[-1].reason == entry.state.reason == "paused by ann: lunch"
