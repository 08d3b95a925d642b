"""A pool finds by trying whether and how speculation pays; beside plain decoding it loses no more than the trials."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cluster.core.tactics import Tactic, TacticChoice, Trials, tactics_for
from cluster.messages.request import DraftLengthMode, HoldMode

pytestmark = pytest.mark.unit

ALL = (Tactic.WAIT, Tactic.OVERLAP, Tactic.PLAIN)
PLAIN_RATE = 70.0


class Pool:
    """A pool that emits so many tokens per second under each tactic, some more and some less."""

    def __init__(self, rates: dict[Tactic, float], seed: int = 0) -> None:
        self.rates = rates
        self.trials = Trials(ALL)
        self.num_tokens = self.seconds = 0.0
        self._random = random.Random(seed)

    def run(self, num_steps: int) -> Counter[Tactic]:
        """How often each tactic was in use."""
        used: Counter[Tactic] = Counter()
        for _ in range(num_steps):
            tactic = self.trials.tactic
            num_tokens = 1.0 if tactic is Tactic.PLAIN else self._random.uniform(1.0, 3.0)
            seconds = num_tokens / self.rates[tactic] * self._random.uniform(0.9, 1.1)
            used[tactic] += 1
            self.num_tokens += num_tokens
            self.seconds += seconds
            self.trials.observe(num_tokens, seconds)
        return used


def rates(**relative: float) -> dict[Tactic, float]:
    """Tokens per second, given relative to plain decoding's."""
    return {tactic: PLAIN_RATE * relative.get(tactic.value, 1.0) for tactic in Tactic}


@pytest.mark.parametrize(("mode", "hold", "expected"), [
    (DraftLengthMode.FIXED, HoldMode.BREAK_EVEN, {Tactic.OVERLAP}),
    (DraftLengthMode.FIXED, HoldMode.DEADLINE, {Tactic.OVERLAP}),
    (DraftLengthMode.ADAPTIVE, HoldMode.BREAK_EVEN, set(Tactic)),
    (DraftLengthMode.ADAPTIVE, HoldMode.DEADLINE, {Tactic.WAIT, Tactic.PLAIN}),
    (DraftLengthMode.ADAPTIVE, HoldMode.NEVER, {Tactic.OVERLAP, Tactic.PLAIN}),
])  # fmt: skip
def test_what_is_configured_bounds_the_choice(mode: DraftLengthMode, hold: HoldMode, expected: set[Tactic]) -> None:
    assert set(tactics_for(mode, hold)) == expected


def test_without_a_choice_nothing_is_tried() -> None:
    trials = Trials((Tactic.OVERLAP,))
    for _ in range(1000):
        assert (trials.tactic, trials.is_trial) == (Tactic.OVERLAP, False)
        trials.observe(1.0, 1.0)


@pytest.mark.parametrize("best", ALL)
def test_it_settles_on_the_tactic_that_is_the_best(best: Tactic) -> None:
    pool = Pool(rates(wait=0.8, overlap=0.8) | {best: 1.3 * PLAIN_RATE})
    pool.run(500)
    assert pool.run(2000)[best] > 0.93 * 2000


def test_speculation_that_never_pays_costs_three_percent_where_its_steps_take_thrice_as_long() -> None:
    pool = Pool(rates(wait=0.6, overlap=0.7))
    pool.run(5000)
    assert pool.num_tokens / pool.seconds > 0.965 * PLAIN_RATE


def test_it_follows_a_pool_that_changes() -> None:
    pool = Pool(rates(wait=0.6, overlap=0.7))
    pool.run(3000)
    pool.rates = rates(wait=1.6, overlap=0.7)
    pool.run(1200)
    assert pool.run(300)[Tactic.WAIT] > 250
    pool.rates = rates(wait=0.6, overlap=0.7)
    pool.run(1200)
    assert pool.run(300)[Tactic.PLAIN] > 250


def test_a_difference_within_the_noise_does_not_change_the_tactic() -> None:
    pool = Pool(rates(wait=1.4, overlap=1.42))
    pool.run(100)
    assert pool.run(1000)[Tactic.WAIT] > 800


def test_a_pool_that_was_held_up_once_does_not_doubt_its_tactic() -> None:
    pool = Pool(rates(wait=1.5))
    pool.run(60)
    pool.trials.observe(1.0, 1000.0)
    assert pool.run(500)[Tactic.WAIT] > 450


def test_the_gain_is_what_was_measured_and_unknown_before() -> None:
    pool = Pool(rates(wait=1.5))
    assert pool.trials.gain() is None
    pool.run(60)
    assert pool.trials.tactic is Tactic.WAIT
    assert pool.trials.gain() == pytest.approx(1.5, rel=0.1)


def run(trials: Trials, while_on: tuple[Tactic, ...]) -> None:
    while trials.tactic in while_on:
        trials.observe(1.0, 1.0)


def test_the_first_steps_after_a_change_say_nothing_about_it() -> None:
    trials = Trials(ALL)
    for _ in range(2):
        trials.observe(1.0, 100.0)
    run(trials, while_on=(Tactic.WAIT,))
    for _ in range(2):
        trials.observe(1.0, 100.0)
    run(trials, while_on=(Tactic.OVERLAP, Tactic.PLAIN))
    assert trials.gain() == pytest.approx(1.0)


def test_a_tactic_that_was_found_to_be_the_best_is_no_loss_though_steps_have_become_longer() -> None:
    pool = Pool(rates(wait=1.5))
    pool.run(60)
    pool.rates = rates(wait=0.5, plain=0.4)
    pool.run(100)
    assert pool.trials.gain() == 1.0


class Clock:
    """A pool whose steps take as long whatever the number of sequences, twice as long while they wait for guesses."""

    def __init__(self) -> None:
        self.choice = TacticChoice(ALL)
        self.now = 0.0

    def step(self, num_sequences: int) -> None:
        tactic = self.choice.trials(num_sequences).tactic
        self.now += 1.0 if tactic is Tactic.PLAIN else 2.0
        self.choice.observe(num_sequences, num_sequences * (3.0 if tactic is Tactic.WAIT else 1.0), self.now)


def test_batches_of_another_size_have_another_tactic() -> None:
    clock = Clock()
    for _ in range(14):
        clock.step(1)
    assert clock.choice.trials(1).tactic is not Tactic.WAIT
    assert clock.choice.trials(8).tactic is Tactic.WAIT


def test_only_time_between_two_decodes_of_as_many_sequences_counts() -> None:
    clock = Clock()
    for _ in range(20):
        clock.step(2)
        clock.step(3)  # of the same size, but the time since the step before is not one step's
        clock.choice.skip(3)
        clock.now += 1000.0
    assert clock.choice.trials(2).tactic is Tactic.WAIT
    for _ in range(12):
        clock.step(2)
    assert clock.choice.trials(2).tactic is not Tactic.WAIT


def test_a_trial_that_prompts_keep_from_being_one_is_put_off() -> None:
    clock = Clock()
    assert clock.choice.trials(4).is_trial
    for _ in range(100):
        clock.choice.skip(4)
    assert not clock.choice.trials(4).is_trial
    for _ in range(1000):
        clock.step(4)
    assert clock.choice.trials(4).gain() == pytest.approx(1.5)


def test_the_gain_does_not_depend_on_how_many_sequences_there_are() -> None:
    clock = Clock()
    for number in (4, 7, 4):
        for _ in range(150):
            clock.step(number)
        assert clock.choice.trials(number).gain() == pytest.approx(1.5)
