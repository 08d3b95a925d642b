"""What a report says of requests: figures by group, canaries beside controls, and why speculation does not pay."""

from __future__ import annotations

import pytest

from cluster.control import report as report_module
from cluster.control.breakdown import Breakdown, Window
from cluster.control.dimensions import Dimension
from cluster.control.finished_request import FinishedRequest, Outcome
from cluster.control.report import Report, report
from cluster.control.report_query import ReportQuery, parse_query
from cluster.messages.answer import RequestError
from tests.finished import finished, guessed

pytestmark = pytest.mark.unit

BY_VARIANT = (Dimension.TENANT, Dimension.VARIANT)


def reported(*requests: FinishedRequest, by: tuple[Dimension, ...] = BY_VARIANT) -> Report:
    breakdown = Breakdown(lambda: 1_000.0)
    breakdown.add(requests)
    return report(breakdown, Window.MINUTE, by)


def test_a_row_has_the_figures_of_its_group() -> None:
    made = reported(
        *(finished(i, tpot_s=0.01) for i in range(7)),
        *(finished(i, tpot_s=0.05) for i in range(2)),
        finished(outcome=Outcome.ERROR, guesses=guessed(2.0, 80, fell_back=True)),
        finished(tenant="globex"),
    )
    assert (made.requests, made.window, made.started_at, made.ended_at) == (11, "1m", 940.0, 1_000.0)
    assert [row.values for row in made.rows] == [("acme", "default"), ("globex", "default")]
    row = made.rows[0]
    assert (row.requests, row.error_rate, row.fallback_rate) == (10, 0.1, 0.1)
    assert row.tpot_p50_s == pytest.approx(0.01, rel=0.02)
    assert row.tpot_p95_s == pytest.approx(0.05, rel=0.02)
    assert row.ttft_p50_s == pytest.approx(0.1, rel=0.02)
    assert row.itl_p95_s == pytest.approx(0.02, rel=0.02)
    assert row.itl_p99_s == pytest.approx(0.03, rel=0.02)
    assert row.acceptance_length == pytest.approx(600 / (9 * 60 + 30))
    assert row.accepted_per_position == (0.8, 0.4)


def test_a_canary_stands_beside_the_control_of_its_own_group() -> None:
    made = reported(
        finished(variant="canary", tpot_s=0.02, guesses=guessed(3.0, 90)),
        finished(variant="control", tpot_s=0.01),
        finished(tenant="globex", variant="canary"),
        finished(tenant="initech", variant="default"),
        finished(tenant="initech", variant="control"),
    )
    (comparison,) = made.comparisons
    assert (comparison.values, comparison.variant) == (("acme",), "canary")
    assert comparison.tpot_p50 == pytest.approx(2.0, rel=0.04)
    assert comparison.acceptance_length == pytest.approx(3.0)
    assert reported(finished(variant="canary"), finished(variant="control"), by=(Dimension.TENANT,)).comparisons == ()


PLAIN = tuple(finished(i, variant="off", tpot_s=0.01) for i in range(6))


def explained(*speculating: FinishedRequest) -> str | None:
    made = reported(*PLAIN, *speculating, by=(Dimension.VARIANT,))
    return {row.values: row.explanation for row in made.rows}["default",]


def test_speculation_that_pays_needs_no_explanation() -> None:
    assert explained(*(finished(i, tpot_s=0.006, guesses=guessed(2.5, 80)) for i in range(6))) is None


def test_too_few_requests_say_nothing() -> None:
    assert explained(*(finished(i, tpot_s=0.1, guesses=guessed(1.2, 10)) for i in range(4))) is None


def test_an_acceptance_length_below_the_break_even_is_explained_by_its_causes() -> None:
    said = explained(*(finished(i, tpot_s=0.015, guesses=guessed(1.2, 20)) for i in range(6)))
    assert said is not None
    assert "acceptance length 1.20 is below the break-even of 1.7" in said
    assert "only 20% of first guesses are right" in said
    assert "steps" not in said


def test_late_drafts_and_lost_drafters_are_named() -> None:
    said = explained(*(finished(i, tpot_s=0.015, guesses=guessed(1.5, 90, 10, fell_back=i < 3)) for i in range(6)))
    assert said is not None
    assert "only 25% of steps had guesses: drafts come late" in said
    assert "50% of requests lost their drafter" in said
    assert "first guesses" not in said


def test_without_plain_requests_only_the_obvious_is_said() -> None:
    vain = [finished(i, guesses=guessed(1.0, 0)) for i in range(6)]
    (row,) = reported(*vain).rows
    assert row.break_even is None
    assert "no plain requests to compare with" in (row.explanation or "")
    (row,) = reported(*(finished(i, guesses=guessed(1.5, 50)) for i in range(6))).rows
    assert row.explanation is None


def test_the_busiest_groups_are_told_and_the_rest_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "MAX_ROWS", 2)
    made = reported(*(finished(tenant=f"t{i}") for i in range(4)), finished(tenant="t3"), finished(tenant="t2"))
    assert [row.values[0] for row in made.rows] == ["t2", "t3"]
    assert (made.requests, made.left_out) == (6, 2)


def test_a_query_is_read_or_refused_by_field() -> None:
    assert parse_query("", []) == ReportQuery()
    asked = parse_query("1h", ["variant", "tenant", "variant"])
    assert asked == ReportQuery(Window.HOUR, (Dimension.VARIANT, Dimension.TENANT))
    for window, by, field in (("2m", [], "window"), ("1m", ["user"], "by"), ("1m", [""], "by")):
        with pytest.raises(RequestError, match=field) as failure:
            parse_query(window, by)
        assert failure.value.param == field
