"""Accept-iff-equal by enumeration, in fractions: the output distribution is the target's, whatever the draft does."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.acceptance import accept_equal

pytestmark = pytest.mark.property

Tokens = tuple[int, ...]
Model = Callable[[Tokens], tuple[Fraction, ...]]  # tokens so far → probability of each next token


def table_model(rows: dict[int, tuple[int, ...]]) -> Model:
    """A model of order one from integer weights by last token; -1 is the start."""
    return lambda tokens: normalised(rows[tokens[-1] if tokens else -1])


def normalised(weights: tuple[int, ...]) -> tuple[Fraction, ...]:
    return tuple(Fraction(weight, sum(weights)) for weight in weights)


TWO_TOKENS = table_model({-1: (1, 2), 0: (3, 1), 1: (1, 1)})
THREE_TOKENS = table_model({-1: (1, 2, 3), 0: (5, 0, 1), 1: (1, 1, 1), 2: (0, 1, 0)})
DRAFTS = {
    "near": table_model({-1: (1, 1), 0: (2, 1), 1: (2, 3)}),
    "opposite": table_model({-1: (2, 1), 0: (1, 3), 1: (9, 1)}),
    "greedy": table_model({-1: (0, 1), 0: (1, 0), 1: (1, 0)}),
    "always wrong": table_model({-1: (1, 0), 0: (0, 1), 1: (0, 1)}),
}
DRAFTS_OF_THREE = {
    "near": table_model({-1: (2, 2, 3), 0: (4, 1, 1), 1: (1, 1, 2), 2: (1, 2, 1)}),
    "impossible guesses": table_model({-1: (1, 1, 1), 0: (0, 1, 0), 1: (1, 0, 0), 2: (1, 0, 1)}),
}


def sequences(model: Model, length: int, given: Tokens = ()) -> Iterator[tuple[Tokens, Fraction]]:
    """Every continuation of `given` by `length` tokens and its probability."""
    if length == 0:
        yield (), Fraction(1)
        return
    for token, probability in enumerate(model(given)):
        if probability:
            for rest, share in sequences(model, length - 1, (*given, token)):
                yield (token, *rest), probability * share


def samples_along(target: Model, guesses: Tokens) -> Iterator[tuple[Tokens, Fraction]]:
    """The target's own samples at every verified position, each given the guesses before it."""
    choices = [target(guesses[:j]) for j in range(len(guesses) + 1)]
    for tokens in itertools.product(*(range(len(row)) for row in choices)):
        probability = Fraction(1)
        for row, token in zip(choices, tokens, strict=True):
            probability *= row[token]
        if probability:
            yield tokens, probability


def output_distribution(target: Model, draft: Model, num_guesses: int, length: int) -> dict[Tokens, Fraction]:
    """The exact distribution of the first `length` tokens: one verification, then plain decoding."""
    total: Counter[Tokens] = Counter()
    for guesses, drafted in sequences(draft, num_guesses):
        for samples, sampled in samples_along(target, guesses):
            emitted = accept_equal(guesses, samples).emitted[:length]
            for rest, share in sequences(target, length - len(emitted), emitted):
                total[(*emitted, *rest)] += drafted * sampled * share
    return dict(total)


CASES = [(f"two tokens, {name}", TWO_TOKENS, draft) for name, draft in DRAFTS.items()]
CASES += [(f"three tokens, {name}", THREE_TOKENS, draft) for name, draft in DRAFTS_OF_THREE.items()]


@pytest.mark.parametrize("num_guesses", [0, 1, 2, 3])
@pytest.mark.parametrize(("target", "draft"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_output_has_exactly_the_targets_distribution(target: Model, draft: Model, num_guesses: int) -> None:
    length = num_guesses + 1
    assert output_distribution(target, draft, num_guesses, length) == dict(sequences(target, length))


@pytest.mark.parametrize("num_guesses", [1, 2, 3])
def test_independent_draws_agree_with_the_sum_of_squares(num_guesses: int) -> None:
    """For memoryless models, a guess is accepted with probability Σ p·q, each time given the one before."""
    target, draft = (table_model(dict.fromkeys((-1, 0, 1), weights)) for weights in ((1, 3), (2, 1)))
    agreement = Fraction(1, 4) * Fraction(2, 3) + Fraction(3, 4) * Fraction(1, 3)
    mean = sum(
        drafted * sampled * accept_equal(guesses, samples).num_accepted
        for guesses, drafted in sequences(draft, num_guesses)
        for samples, sampled in samples_along(target, guesses)
    )
    assert mean == sum(agreement**j for j in range(1, num_guesses + 1))


# --- shared noise: a token is a function of the tokens before it and of its position's noise --------------------------


def quantile(model: Model, tokens: Tokens, noise: Fraction) -> int:
    """The token at a point of [0, 1): what keyed noise does, with noise that can be enumerated."""
    reached = Fraction(0)
    for token, probability in enumerate(model(tokens)):
        reached += probability
        if noise < reached:
            return token
    raise AssertionError("noise is below 1")


def decode(model: Model, noise: tuple[Fraction, ...], count: int) -> Tokens:
    tokens: Tokens = ()
    for position in range(count):
        tokens = (*tokens, quantile(model, tokens, noise[position]))
    return tokens


@pytest.mark.parametrize(("target", "draft"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_with_shared_noise_every_emitted_token_is_the_plain_one(target: Model, draft: Model) -> None:
    num_guesses, cells = 2, 24  # a grid of noise that reaches every token of every row
    points = [Fraction(2 * i + 1, 2 * cells) for i in range(cells)]
    for noise in itertools.product(points, repeat=num_guesses + 1):
        guesses = decode(draft, noise, num_guesses)
        samples = tuple(quantile(target, guesses[:j], noise[j]) for j in range(num_guesses + 1))
        emitted = accept_equal(guesses, samples).emitted
        assert emitted == decode(target, noise, len(emitted))


@given(data=st.data(), vocab=st.integers(1, 3), num_guesses=st.integers(0, 6))
def test_any_guesses_at_all_leave_the_plain_output_unchanged(data: st.DataObject, vocab: int, num_guesses: int) -> None:
    """The target's sample after each prefix is fixed by the noise; guesses only decide which ones are looked at."""
    choice: dict[Tokens, int] = {}
    tokens = st.integers(0, vocab - 1)

    def sample(prefix: Tokens) -> int:
        if prefix not in choice:
            choice[prefix] = data.draw(tokens)
        return choice[prefix]

    guesses = tuple(data.draw(st.lists(tokens, min_size=num_guesses, max_size=num_guesses)))
    samples = tuple(sample(guesses[:j]) for j in range(num_guesses + 1))
    result = accept_equal(guesses, samples)
    plain: Tokens = ()
    for _ in result.emitted:
        plain = (*plain, sample(plain))
    assert result.emitted == plain
    assert 1 <= len(result.emitted) == result.num_accepted + 1 <= num_guesses + 1
    assert result.emitted[: result.num_accepted] == guesses[: result.num_accepted]


@given(guesses=st.lists(st.integers(0, 2), max_size=6), samples=st.lists(st.integers(0, 2), max_size=8))
def test_samples_that_do_not_fit_the_guesses_are_refused(guesses: list[int], samples: list[int]) -> None:
    if len(samples) == len(guesses) + 1:
        assert accept_equal(guesses, samples).emitted[-1] in samples
    else:
        with pytest.raises(ValueError, match="need one more sample"):
            accept_equal(guesses, samples)
