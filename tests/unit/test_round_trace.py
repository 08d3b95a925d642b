"""Marks of several processes become rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.messages.rounds import Close, Commit, Committed, DraftBlock, PoolLoad
from cluster.tracing.marks import TRACE_VARIABLE, Mark, Place, TraceLog, read_marks, trace_file
from load_tests.round_trace import NAMES, join, median_round
from load_tests.trace_picture import chrome_trace, lane_of, svg

LENGTH = 10
DRAFT_STEP = (Place.DRAFT_STEP, Place.DRAFT_FORWARD, Place.DRAFT_LOGITS, Place.DRAFT_SAMPLED, Place.DRAFT_APPLIED)
BEFORE = (
    Place.TARGET_EMITTED, Place.TARGET_SENT, Place.ROUTER_COMMIT, Place.ROUTER_ASKED, Place.DRAFT_RECEIVED,
    Place.DRAFT_TAKEN,
)  # fmt: skip
AFTER = (
    Place.DRAFT_EMITTED, Place.DRAFT_SENT, Place.ROUTER_BLOCK, Place.ROUTER_PROPOSED, Place.TARGET_RECEIVED,
    Place.TARGET_TAKEN, Place.TARGET_STEP, Place.TARGET_FORWARD, Place.TARGET_LOGITS, Place.TARGET_SAMPLED,
    Place.TARGET_APPLIED,
)  # fmt: skip


def round_marks(
    places: Sequence[Place] = (*BEFORE, *DRAFT_STEP, *DRAFT_STEP, *AFTER), request: str = "r"
) -> list[Mark]:
    """A round from LENGTH to LENGTH + 2 tokens with 1 ns between marks."""
    marks = [Mark(place, request, LENGTH, 1, at_ns) for at_ns, place in enumerate(places)]
    return [*marks, Mark(Place.TARGET_EMITTED, request, LENGTH + 2, 2, len(places))]


def test_a_round_runs_from_one_commit_to_the_next_without_gaps() -> None:
    trace = join(reversed(round_marks()))
    (found,) = trace.rounds
    assert (found.length, found.duration_ns, not trace.left_out) == (LENGTH, 27, True)
    assert sum(found.by_name().values()) == found.duration_ns
    assert found.by_name()["draft: model"] == 2, "steps are summed"
    assert found.outside_forwards == pytest.approx(1 - 3 / 27)


def test_a_frame_that_comes_twice_counts_once() -> None:
    again = [Mark(place, "r", LENGTH, 1, 26) for place in (Place.ROUTER_COMMIT, Place.TARGET_RECEIVED)]
    assert join([*round_marks(), *again]) == join(round_marks())


@pytest.mark.parametrize("lost", [*BEFORE[:3], *BEFORE[4:], *AFTER])
def test_a_round_that_lacks_a_mark_is_left_out_by_its_name(lost: Place) -> None:
    trace = join(mark for mark in round_marks() if (mark.place, mark.length) != (lost, LENGTH))
    assert (trace.rounds, trace.left_out) == ((), {f"no {lost}": 1})


def test_a_round_that_ends_with_its_request_is_left_out() -> None:
    assert join(round_marks()[:-1]).left_out == {"no next commit": 1}


def test_a_target_that_went_on_without_its_block_makes_no_round() -> None:
    step = AFTER[6:]
    places = (*BEFORE, *step, *AFTER[:6])
    assert join(round_marks(places)).left_out == {"out of order": 1}


def test_a_draft_step_without_its_end_makes_no_round() -> None:
    assert join(round_marks((*BEFORE, *DRAFT_STEP[:3], *AFTER))).left_out == {"a draft step is cut": 1}


def test_passes_of_a_chain_are_summed_like_steps() -> None:
    step, forward, logits, *rest = DRAFT_STEP
    (found,) = join(
        round_marks((*BEFORE, step, forward, logits, forward, logits, forward, logits, *rest, *AFTER))
    ).rounds
    assert sum(found.by_name().values()) == found.duration_ns
    assert (found.by_name()["draft: model"], found.by_name()["draft: sample, go on in a chain"]) == (3, 2)


def test_guesses_that_were_kept_need_no_step() -> None:
    (found,) = join(round_marks((*BEFORE, *AFTER))).rounds
    assert found.by_name()["draft: guesses kept, no step"] == 1


def test_requests_do_not_mix() -> None:
    trace = join([*round_marks(request="a"), *round_marks(request="b")[1:]])
    assert [found.request_id for found in trace.rounds] == ["a"]
    assert trace.left_out == {f"no {Place.TARGET_EMITTED}": 1}


def test_an_answer_is_found_by_counting_its_tokens() -> None:
    prompt = Mark(Place.TARGET_EMITTED, "r", LENGTH, 1, 0)
    after = Mark(Place.TARGET_EMITTED, "r", LENGTH + 2, 2, 10)
    sent = [Mark(Place.ROUTER_ANSWERED, "r", 0, count, at) for count, at in ((1, 3), (0, 4), (2, 14))]
    read = [Mark(Place.CLIENT_RECEIVED, "r", 0, count, at) for count, at in ((1, 5), (2, 19))]
    answers = join([prompt, after, *sent, *read]).answers
    assert [(answer.router_ns, answer.proxy_ns) for answer in answers] == [(3, 2), (4, 5)]


def test_pictures_hold_every_span() -> None:
    rounds = join([*round_marks(request="a"), *round_marks(request="b")]).rounds
    events = [event for event in chrome_trace(rounds)["traceEvents"] if event["ph"] == "X"]
    assert len(events) == sum(len(item.spans) for item in rounds)
    picture = svg(median_round(rounds))
    assert all(span.name.replace(">", "&gt;") in picture for span in rounds[0].spans)
    assert {lane_of(span) for span in rounds[0].spans} == {"target", "draft", "router", "wire"}


def test_every_part_has_a_name_of_its_own() -> None:
    assert len(set(NAMES.values())) == len(NAMES)


def test_only_messages_of_a_round_are_marked() -> None:
    log = TraceLog(clock_ns=lambda: 7)
    for message in (
        Commit("r", 4, (1, 2)), Commit("r", 6, ()), DraftBlock("r", 6, (3,)), DraftBlock("r", 6, ()),
        Committed("r", 1, 4, (1, 2), 4), Committed("r", 1, 6, (1,), 0), Close("r"), PoolLoad(0, 0, 1, 1, 0),
    ):  # fmt: skip
        log.pass_message(Place.ROUTER_COMMIT, message)
    assert [(mark.length, mark.num_tokens, mark.at_ns) for mark in log.marks()] == [(6, 2, 7), (6, 1, 7), (6, 2, 7)]


def test_a_log_keeps_the_latest_marks_and_reads_back_what_it_wrote(tmp_path: Path) -> None:
    log = TraceLog(limit=3)
    for length in range(5):
        log.mark(Place.DRAFT_STEP, "r", length, 1)
    log.write(tmp_path / "draft.jsonl")
    marks = tuple(read_marks([tmp_path / "draft.jsonl"]))
    assert marks == log.marks()
    assert [mark.length for mark in marks] == [2, 3, 4]


def test_tracing_is_off_unless_a_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(TRACE_VARIABLE, raising=False)
    assert trace_file("target") is None
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path))
    file = trace_file("target")
    assert file is not None
    file.write()
    assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == ["target"]
