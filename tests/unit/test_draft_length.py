"""K follows measured acceptance and measured costs, reluctantly, and comes back after it was off."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cluster.core.cost_model import DraftCost, StepCost
from cluster.core.draft_length import DraftAsk, DraftLengthConfig, DraftLengthController, DraftLengthState
from cluster.core.tactics import Tactic, TacticChoice
from cluster.messages.request import MAX_DRAFT_TOKENS, DraftLengthMode

pytestmark = pytest.mark.unit

STEP_S = 0.1


def controller(
    per_guess_s: float = 0.005, overhead_s: float = 0.002, per_row_s: float = 0.0, hysteresis: float = 0.1
) -> DraftLengthController:
    """One that has measured a pool with these costs."""
    made = DraftLengthController(DraftLengthConfig(hysteresis=hysteresis))
    for num_rows in (1, 2, 4, 8, 16, 64, 256):
        made.observe_step(num_rows, STEP_S + num_rows * per_row_s)
    pool = DraftLengthState(8)
    made.observe_arrival(pool, 4, 4 * per_guess_s, overhead_s + 4 * per_guess_s)
    return made


def verify(made: DraftLengthController, state: DraftLengthState, accepted: int, rounds: int = 40) -> None:
    for _ in range(rounds):
        made.observe_acceptance(state, 4, accepted)


def settle(made: DraftLengthController, accepted: int, num_sequences: int = 1) -> int:
    state = DraftLengthState(8)
    verify(made, state, accepted)
    return made.next_ask(state, 1000, num_sequences).draft_len


@pytest.mark.parametrize(("remaining", "expected"), [(100, 5), (4, 3), (1, 0), (0, 0)])
def test_a_fixed_length_leaves_room_for_the_targets_own_token(remaining: int, expected: int) -> None:
    fixed = DraftLengthController(DraftLengthConfig(DraftLengthMode.FIXED))
    assert fixed.next_ask(DraftLengthState(5), remaining, 1).draft_len == expected


@pytest.mark.parametrize("mode", DraftLengthMode)
def test_a_request_asks_for_as_many_guesses_as_its_own_limit_says(mode: DraftLengthMode) -> None:
    made = DraftLengthController(DraftLengthConfig(mode))
    for limit in (0, 2, 20, MAX_DRAFT_TOKENS):
        assert made.next_ask(DraftLengthState(limit), 100, 1).draft_len == limit
    assert made.next_ask(DraftLengthState(1000), 100, 1).draft_len == MAX_DRAFT_TOKENS


def test_a_wide_window_is_chosen_when_it_pays() -> None:
    made = controller(per_guess_s=0.0001)
    state = DraftLengthState(MAX_DRAFT_TOKENS)
    for _ in range(400):
        made.observe_acceptance(state, 8, 8)
    assert made.next_ask(state, 1000, 1).draft_len > 20


def test_a_drafter_that_knows_its_chances_may_go_on_while_a_guess_is_worth_its_time() -> None:
    made = controller(per_guess_s=0.02)
    state = DraftLengthState(6)
    verify(made, state, 2)
    ask = made.next_ask(state, 1000, 1, shows_chances=True)
    rate, a = made.expected_tokens(state, ask.draft_len) / (0.002 + 0.02 * ask.draft_len + STEP_S), 2 / 3
    assert (ask.draft_len, ask.longest_len) == (2, 6)
    assert ask.min_confidence == pytest.approx(0.02 * rate / a, rel=0.03)
    assert made.next_ask(state, 1000, 1) == DraftAsk(2, 2, 0.0), "the chance of a drawn guess says nothing"


def test_dear_guesses_must_be_surer() -> None:
    asks = []
    for per_row_s in (0.001, 0.01, 0.02):
        made = controller(per_row_s=per_row_s)
        state = DraftLengthState(6)
        verify(made, state, 3)
        asks.append(made.next_ask(state, 1000, 1, shows_chances=True).min_confidence)
    assert 0 < asks[0] < asks[1] < asks[2] < 1


def test_a_limit_far_beyond_what_pays_does_not_make_guesses_dearer() -> None:
    asks = []
    for limit in (4, MAX_DRAFT_TOKENS):
        made = controller(per_row_s=0.004)
        made.observe_step(32, 10.0)  # rows that no good block ever has
        state = DraftLengthState(limit)
        verify(made, state, 2)
        asks.append(made.next_ask(state, 1000, 1, shows_chances=True))
    assert asks[0].draft_len == asks[1].draft_len
    assert asks[1].min_confidence == pytest.approx(asks[0].min_confidence, rel=0.2)


def test_no_block_grows_beyond_what_would_pay_if_all_of_it_were_right() -> None:
    made = controller(per_guess_s=0.0001)
    for num_rows in (8, 16, 31):
        made.observe_step(num_rows, STEP_S + 1.0 * (num_rows > 8))  # dear from nine rows on
    state = DraftLengthState(MAX_DRAFT_TOKENS)
    verify(made, state, 2)
    ask = made.next_ask(state, 1000, 1, shows_chances=True)
    assert ask.draft_len <= ask.longest_len < 12
    assert ask.min_confidence > 0


def test_no_block_grows_beyond_what_is_waited_for() -> None:
    made = controller(per_guess_s=0.001)
    made.config = DraftLengthConfig(max_arrival_s=0.0065)
    state = DraftLengthState(16)
    verify(made, state, 1)
    ask = made.next_ask(state, 1000, 1, shows_chances=True)
    assert made.arrival_s(state, 4) == pytest.approx(0.006, rel=0.03)
    assert ask.longest_len == max(4, ask.draft_len) < 16


def test_steps_that_seem_to_get_cheaper_are_no_leave_to_guess_without_an_end() -> None:
    made = controller(per_guess_s=0.0)
    for num_rows, seconds in ((2, 0.0125), (5, 0.009), (12, 0.0105), (20, 0.1)) * 60:
        made.observe_step(num_rows, seconds)
    state = DraftLengthState(MAX_DRAFT_TOKENS)
    verify(made, state, 3)
    ask = made.next_ask(state, 1000, 1, shows_chances=True)
    assert ask.min_confidence > 0 or ask.longest_len == ask.draft_len
    assert ask.longest_len < 16


def test_guesses_that_cost_nothing_may_all_be_made() -> None:
    made = controller(per_guess_s=0.0, overhead_s=0.0)
    made.observe_arrival(DraftLengthState(8), 8, 0.0, 0.0)
    state = DraftLengthState(8)
    verify(made, state, 2)
    assert made.next_ask(state, 1000, 1, shows_chances=True) == DraftAsk(8, 8, pytest.approx(0.0))


def test_no_confidence_is_asked_of_a_single_guess_or_a_fixed_length() -> None:
    made, state = controller(), DraftLengthState(1)
    verify(made, state, 4)
    assert made.next_ask(state, 1000, 1, shows_chances=True) == DraftAsk(1, 1, 0.0)
    fixed = DraftLengthController(DraftLengthConfig(DraftLengthMode.FIXED))
    assert fixed.next_ask(DraftLengthState(5), 1000, 1, shows_chances=True) == DraftAsk(5, 5, 0.0)


def test_blocks_that_end_where_their_drafter_is_unsure_are_expected_to_be_right_more_often() -> None:
    """Half of the blocks are a guess that is wrong, half four that are right: the mean of both is what is expected."""
    made, state = controller(), DraftLengthState(8)
    for _ in range(2000):
        made.observe_acceptance(state, 1, 0)
        made.observe_acceptance(state, 4, 4)
    expected = (made.expected_of_pool(1) + made.expected_of_pool(4)) / 2
    assert expected == pytest.approx(1 + (0 + 4) / 2, rel=0.05)


def test_a_limit_that_changes_counts_from_the_next_question_on() -> None:
    made = DraftLengthController(DraftLengthConfig(DraftLengthMode.FIXED))
    state = DraftLengthState(4)
    assert made.next_ask(state, 100, 1).draft_len == 4
    made.set_limit(state, 2)
    assert state.longest_len == 2  # no more are verified
    made.set_limit(state, 8)
    assert state.longest_len == 2  # no more were asked for
    assert made.next_ask(state, 100, 1).draft_len == 8
    made.set_limit(state, 0)
    assert made.next_ask(state, 100, 1).draft_len == 0


def test_before_anything_is_measured_it_asks_and_learns() -> None:
    assert DraftLengthController(DraftLengthConfig()).next_ask(DraftLengthState(5), 100, 1).draft_len == 5


def test_better_guesses_earn_a_wider_window() -> None:
    lengths = [settle(controller(), accepted) for accepted in (0, 1, 2, 4)]
    assert lengths == sorted(lengths)
    assert lengths[0] <= 2
    assert lengths[-1] == 8


def test_useless_guesses_that_cost_something_turn_it_off() -> None:
    assert settle(controller(per_guess_s=0.02), accepted=0) == 0


def test_a_draft_as_slow_as_the_target_turns_it_off() -> None:
    assert settle(controller(per_guess_s=STEP_S), accepted=3) == 0


def test_a_loaded_pool_whose_rows_cost_time_asks_for_fewer_guesses() -> None:
    lengths = [settle(controller(per_row_s=0.002), 3, num_sequences) for num_sequences in (1, 8, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]


def test_a_small_gain_does_not_change_the_length() -> None:
    changes = []
    for hysteresis in (0.0, 0.1):
        made = controller(per_guess_s=0.02, hysteresis=hysteresis)
        state = DraftLengthState(8)
        lengths = []
        for round_number in range(200):
            made.observe_acceptance(state, 4, 1 + 2 * (round_number % 20 // 10))
            lengths.append(made.next_ask(state, 1000, 1).draft_len)
        changes.append(sum(before != after for before, after in pairwise(lengths[100:])))
    assert changes[0] > 5
    assert changes[1] == 0


def test_while_off_it_probes_ever_more_rarely() -> None:
    made = controller(per_guess_s=STEP_S)
    state = DraftLengthState(8)
    verify(made, state, 2)
    lengths = [made.next_ask(state, remaining, 1).draft_len for remaining in range(2000, 0, -1)]
    probes = [index for index, length in enumerate(lengths) if length > 0]
    gaps = [after - before for before, after in zip([0, *probes], probes, strict=False)]
    assert gaps == [64, 128, 256, 512, 512, 512]


def test_it_comes_back_when_a_probe_finds_a_better_draft() -> None:
    made = controller(per_guess_s=0.02)
    state = DraftLengthState(8)
    verify(made, state, 0)
    assert made.next_ask(state, 1000, 1).draft_len == 0
    assert made.next_ask(state, 1000 - 64, 1).draft_len > 0
    verify(made, state, 4, rounds=5)
    assert made.next_ask(state, 900, 1).draft_len > 0
    assert made.next_ask(state, 899, 1).draft_len > 0


# --- what was tried counts more than what is predicted ---------------------------------------------------------------


def tried(gain: float, per_guess_s: float = 0.005) -> DraftLengthController:
    """One whose pool has found that waiting for guesses gains so much over plain decoding."""
    made = controller(per_guess_s=per_guess_s)
    made.tactics = TacticChoice((Tactic.WAIT, Tactic.PLAIN))
    now = 0.0
    for _ in range(200):
        now += STEP_S
        waits = made.tactics.trials(1).tactic is Tactic.WAIT
        made.tactics.observe(1, gain if waits else 1.0, now)
    return made


def test_a_pool_that_found_guesses_not_to_pay_asks_for_none() -> None:
    made = tried(gain=0.8)
    state = DraftLengthState(8)
    verify(made, state, 4)
    assert made.tactics.trials(1).tactic is Tactic.PLAIN
    assert made.next_ask(state, 1000, 1).draft_len == 0


def test_a_pool_that_found_guesses_to_pay_asks_for_them_though_they_should_not() -> None:
    made = tried(gain=1.5, per_guess_s=STEP_S)
    state = DraftLengthState(8)
    verify(made, state, 2)
    assert made.next_ask(state, 1000, 1).draft_len > 0


def test_a_request_that_is_guessed_much_worse_than_the_others_asks_for_none() -> None:
    made = tried(gain=1.3)
    verify(made, DraftLengthState(8), 4, rounds=1000)
    poor = DraftLengthState(8)
    verify(made, poor, 0)
    assert made.next_ask(poor, 1000, 1).draft_len == 0
    assert made.next_ask(DraftLengthState(8), 1000, 1).draft_len > 0


def test_a_trial_asks_whatever_is_predicted() -> None:
    made = controller(per_guess_s=STEP_S)
    made.tactics = TacticChoice((Tactic.WAIT, Tactic.PLAIN))
    state = DraftLengthState(8)
    verify(made, state, 0)
    assert made.next_ask(state, 1000, 1).draft_len > 0


def test_a_new_request_starts_from_what_the_pool_has_seen() -> None:
    made = controller()
    verify(made, DraftLengthState(8), 0, rounds=200)
    low = made.acceptance_rate(DraftLengthState(8))
    verify(made, DraftLengthState(8), 4, rounds=1000)
    assert low < 0.2 < 0.9 < made.acceptance_rate(DraftLengthState(8))


def test_the_acceptance_rate_does_not_depend_on_the_window() -> None:
    """At 3 accepted for each rejection: in windows of 1, 3 of 4 verifications accept; in windows of 4, 3 at a time."""
    narrow, wide = controller(), controller()
    narrow_state, wide_state = DraftLengthState(8), DraftLengthState(8)
    for _ in range(300):
        for accepted in (1, 1, 0, 1):
            narrow.observe_acceptance(narrow_state, 1, accepted)
        wide.observe_acceptance(wide_state, 4, 3)
    assert narrow.acceptance_rate(narrow_state) == pytest.approx(0.75, abs=0.05)
    assert wide.acceptance_rate(wide_state) == pytest.approx(0.75, abs=0.05)


def test_expected_tokens_count_the_targets_own() -> None:
    made = controller()
    state = DraftLengthState(8)
    verify(made, state, 4, rounds=2000)
    assert made.expected_tokens(state, 4) == pytest.approx(5, abs=0.1)
    assert made.expected_tokens(state, 0) == 1


def test_a_requests_own_arrivals_count_before_the_pools() -> None:
    made = controller(per_guess_s=0.01, overhead_s=0.0)
    state = DraftLengthState(8)
    assert made.arrival_s(state, 3) == pytest.approx(0.03)
    made.observe_arrival(state, 4, 0.0, 0.001)
    assert made.arrival_s(state, 3) == pytest.approx(0.001)


# --- costs -----------------------------------------------------------------------------------------------------------


def test_step_costs_are_interpolated_between_sizes_and_extrapolated_past_them() -> None:
    cost = StepCost()
    assert cost.predict(1) is None
    cost.observe(4, 0.014)
    assert cost.predict(9) == pytest.approx(0.014)
    cost.observe(16, 0.026)
    assert [cost.predict(rows) for rows in (1, 4, 10, 16, 20)] == pytest.approx([0.011, 0.014, 0.02, 0.026, 0.03])


def test_a_fixed_cost_is_never_negative_and_more_rows_never_cheaper() -> None:
    cost = StepCost()
    cost.observe(4, 0.004)
    cost.observe(16, 0.040)
    assert cost.predict(1) == pytest.approx(0.001)
    cost = StepCost()
    cost.observe(4, 0.04)
    cost.observe(16, 0.02)
    assert cost.predict(64) == pytest.approx(0.02)


def test_a_cold_start_is_forgotten_at_once() -> None:
    cost = StepCost()
    cost.observe(1, 5.0)
    cost.observe(1, 0.02)
    assert cost.predict(1) == pytest.approx(0.02)


def test_the_first_measurements_weigh_the_same() -> None:
    cost = StepCost()
    for seconds in (0.03, 0.02, 0.01):
        cost.observe(1, seconds)
    assert cost.predict(1) == pytest.approx(0.02)


def test_one_block_tells_only_what_a_guess_takes_altogether() -> None:
    cost = DraftCost()
    assert cost.predict(2) == 0
    cost.observe(4, 0.04)
    assert [cost.predict(number) for number in (1, 2, 4)] == pytest.approx([0.01, 0.02, 0.04])


def test_blocks_of_several_lengths_tell_what_one_more_guess_takes() -> None:
    cost = DraftCost()
    for round_ in range(50):
        cost.observe(1 + round_ % 3, 0.010 + 0.002 * (1 + round_ % 3))
    assert [cost.predict(number) for number in (1, 3, 5)] == pytest.approx([0.012, 0.016, 0.02], rel=0.02)


def test_neither_part_of_a_drafts_time_is_negative() -> None:
    cost = DraftCost()
    for number, seconds in ((1, 0.002), (4, 0.012)) * 9:
        cost.observe(number, seconds)
    assert 0 < cost.predict(1) < cost.predict(2) <= cost.predict(4) / 2 + 1e-9
    cost = DraftCost()
    for number, seconds in ((1, 0.012), (4, 0.009)) * 9:
        cost.observe(number, seconds)
    assert cost.predict(8) == pytest.approx(cost.predict(1)) == pytest.approx(0.0105, rel=0.03)


def test_a_draft_that_starts_cold_or_stumbles_is_soon_forgotten() -> None:
    cost = DraftCost()
    for number in (5, 2, 3):  # several replicas, or several requests at once
        cost.observe(number, 1e308)
    for round_ in range(30):
        cost.observe(1 + round_ % 4, 0.001 * (1 + round_ % 4))
    cost.observe(1, 0.5)
    assert cost.predict(4) == pytest.approx(0.004, rel=0.05)


def test_blocks_whose_guesses_were_there_already_are_not_taken_for_all_blocks() -> None:
    cost = DraftCost()
    for _ in range(30):
        cost.observe(3, 0.0)
    assert cost.predict(3) == 0
    for round_ in range(300):
        cost.observe(1 + round_ % 4, 0.0 if round_ % 10 == 0 else 0.001 * (1 + round_ % 4))
    assert cost.predict(4) == pytest.approx(0.0036, rel=0.1)
