"""Who starts next: priority, then the tenant that has had least, then arrival; now and then whoever came first."""

from __future__ import annotations

import pytest

from cluster.core.admission import SchedulerConfig, make_sequence
from cluster.core.sequence import Sequence
from cluster.core.tenant_shares import TenantShares
from cluster.core.waiting_line import AGING_INTERVAL, WaitingLine, in_order_of_keeping, in_order_of_service
from cluster.messages.rounds import Submit
from tests.fakes import sampling

pytestmark = pytest.mark.unit

CONFIG = SchedulerConfig(8, 64, 10_000, 100, vocab_size=50)


class Line:
    """A waiting line and what goes through it; names are tenant + number."""

    def __init__(self, max_lead: int = 1000) -> None:
        self.shares = TenantShares(max_lead)
        self.waiting = WaitingLine(self.shares)
        self.num_arrived = 0

    def add(self, name: str, prompt_len: int = 10, priority: int = 0) -> Sequence:
        submit = Submit(name, (1,) * prompt_len, sampling(), priority=priority, tenant=name[0])
        sequence = make_sequence(submit, CONFIG, self.num_arrived, 0.0)
        self.num_arrived += 1
        self.shares.enter(name[0])
        self.waiting.add(sequence)
        return sequence

    def start(self) -> Sequence:
        sequence = self.waiting.first
        self.waiting.start(sequence)
        self.waiting.check_integrity()
        return sequence

    def start_all(self) -> list[str]:
        return [self.start().request_id for _ in range(len(self.waiting))]


def test_tenants_take_turns_by_tokens_whatever_one_of_them_sends() -> None:
    line = Line()
    for name in ("a1", "a2", "a3", "a4", "b1", "b2"):
        line.add(name)
    assert line.start_all() == ["a1", "b1", "a2", "b2", "a3", "a4"]


def test_a_tenant_of_long_prompts_gets_fewer_of_them() -> None:
    line = Line()
    for name in ("a1", "a2", "b1", "b2", "b3"):
        line.add(name, prompt_len=30 if name[0] == "a" else 10)
    assert line.start_all() == ["a1", "b1", "b2", "b3", "a2"]


def test_tokens_of_the_output_count_too() -> None:
    line = Line()
    line.add("a1"), line.add("b1")
    line.start(), line.start()
    line.shares.charge("a", 5)
    line.add("a2"), line.add("b2")
    assert line.start().request_id == "b2"


def test_a_lower_priority_number_goes_first_whoever_has_had_most() -> None:
    line = Line()
    for name, priority in (("a1", 1), ("b1", 0), ("b2", 0), ("c1", -5)):
        line.add(name, priority=priority)
    assert line.start_all() == ["c1", "b1", "b2", "a1"]


def test_a_preempted_sequence_is_ahead_of_its_tenants_later_ones_and_pays_once() -> None:
    line = Line()
    first = line.add("a1")
    line.start()
    line.add("a2")
    first.reset_kv()
    line.waiting.add(first)
    served = line.shares.served("a")
    assert line.start() is first
    assert line.shares.served("a") == served


def test_however_long_a_tenant_was_away_only_a_bounded_burst_of_it_goes_first() -> None:
    line = Line(max_lead=30)
    line.add("a1", prompt_len=500)
    line.start()
    for name in ("b1", "b2", "b3", "a2", "b4", "b5", "b6"):
        line.add(name)
    assert line.shares.served("b") == 470
    assert line.start_all() == ["b1", "b2", "b3", "a2", "b4", "b5", "b6"]


def test_a_tenant_that_ran_little_for_long_has_no_more_credit_than_a_new_one() -> None:
    line = Line(max_lead=30)
    line.add("q1"), line.add("a1", prompt_len=400)
    line.start(), line.start()
    line.add("q2"), line.add("n1")
    assert line.shares.served("q") == line.shares.served("n") == 370


def test_a_tenant_that_waits_keeps_what_it_is_owed() -> None:
    line = Line(max_lead=30)
    line.add("q1"), line.add("q2"), line.add("a1", prompt_len=400)
    line.start(), line.start()
    line.add("q3")
    assert line.shares.served("q") == 10


def test_tenants_without_sequences_are_forgotten() -> None:
    line = Line()
    line.add("a1"), line.add("a2"), line.add("b1")
    line.shares.leave("a"), line.shares.leave("b")
    assert len(line.shares) == 1
    line.shares.leave("a")
    assert len(line.shares) == 0


def test_the_one_that_waits_longest_starts_once_in_a_while_whatever_its_priority() -> None:
    line = Line()
    low = line.add("a1", priority=9)
    for number in range(AGING_INTERVAL):
        line.add(f"b{number}")
    started = [line.start() for _ in range(AGING_INTERVAL)]
    assert started[-1] is low
    assert [sequence.is_aged for sequence in started] == [False] * (AGING_INTERVAL - 1) + [True]


def test_prompts_are_computed_in_the_order_of_the_line_and_the_aged_go_first() -> None:
    line = Line()
    giant, low, short = line.add("a1", prompt_len=900), line.add("c1", priority=9), line.add("b1")
    for sequence in (giant, low, short):
        line.waiting.start(sequence)
    low.is_aged = False
    assert in_order_of_service([giant, low, short], line.shares) == [short, giant, low]
    low.is_aged = True
    assert in_order_of_service([giant, low, short], line.shares) == [low, short, giant]


def test_the_latest_of_the_tenant_that_has_had_most_gives_way_first_and_the_first_of_all_never() -> None:
    line = Line()
    first, second, third = line.add("a1", 90), line.add("a2", 90), line.add("b1")
    assert line.start_all() == ["a1", "b1", "a2"]
    assert in_order_of_keeping([first, second, third], line.shares) == [first, third, second]
    assert in_order_of_keeping([], line.shares) == []
