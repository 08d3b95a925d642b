"""Penalties, biases and min_tokens: the CPU kernel and the torch sampler give the reference's token for every row."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core import sampling as reference
from cluster.core.logit_history import LogitHistory, logit_history
from cluster.core.sampling import RowFault
from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.messages.request import SamplingParams
from cluster.runtime.logit_adjustments import LogitAdjustments
from cluster.runtime.sampler import Sampler
from cluster.runtime.sampling_batch import SamplingBatch
from tests.property.test_sampler_twins import Rows, any_logits, each_sampler, tied_logits, token_map

pytestmark = pytest.mark.property

VOCAB = 70  # more than one block of the kernel
small_ids = st.integers(0, 12)  # few, so that they meet
any_ids = small_ids | st.integers(0, 3 * VOCAB)  # some that no column scores
penalties = st.sampled_from([0.0, 0.0, -2.0, 0.3, 1.0, 2.0]) | st.floats(-2, 2)
adjusting_params = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([1.0, 0.9]),
    top_k=st.none() | st.integers(1, 8),
    min_p=st.sampled_from([0.0, 0.05]),
    num_logprobs=st.none() | st.integers(0, 4),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.01, 1.3, 10.0]) | st.floats(0.01, 10),
    logit_bias=st.dictionaries(any_ids, st.sampled_from([-100.0, 100.0]) | st.floats(-100, 100), max_size=5).map(
        lambda bias: tuple(bias.items())
    ),
    min_tokens=st.integers(0, 6),
)


@dataclass(frozen=True)
class Case:
    """One sequence's window: what came before it, the guesses in it, and how it is sampled."""

    params: SamplingParams
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    guesses: tuple[int, ...]
    stops: frozenset[int]
    num_samples: int  # the last ones of the window

    def item(self, name: str) -> ScheduledSequence:
        history = logit_history(self.params, self.prompt, self.output, self.stops)
        tokens = (*self.prompt, *self.output, *self.guesses)
        snapshot = None if history is None else history.snapshot(self.guesses)
        return ScheduledSequence(name, tokens, 0, (0,), self.num_samples, self.params, history=snapshot)

    def expected(self, logits: Rows, j: int, names: list[int] | None) -> tuple[int, int]:
        """The token of the j-th sample and its position."""
        before = len(self.guesses) - (self.num_samples - 1) + j
        output = self.output + self.guesses[:before]
        adjusted = reference.adjusted(logits.tolist(), self.params, self.prompt, output, self.stops, names)
        position = len(self.prompt) + len(output)
        return reference.sample(adjusted, self.params, position, names), position


@st.composite
def cases(draw: st.DrawFn) -> Case:
    guesses = draw(st.lists(small_ids, max_size=5).map(tuple))
    return Case(
        draw(adjusting_params),
        draw(st.lists(any_ids, min_size=1, max_size=8).map(tuple)),
        draw(st.lists(any_ids, max_size=8).map(tuple)),
        guesses,
        draw(st.frozensets(st.integers(0, 20), max_size=3)),
        draw(st.sampled_from([1, len(guesses) + 1])),  # a draft's last row, or every row of a window
    )


@st.composite
def rows_for(draw: st.DrawFn, items: list[Case]) -> Rows:
    num_rows = sum(case.num_samples for case in items)
    values = st.lists(draw(st.sampled_from([tied_logits, any_logits])), min_size=VOCAB, max_size=VOCAB)
    logits = np.array(draw(st.lists(values, min_size=num_rows, max_size=num_rows)), dtype=np.float32)
    logits[:, -1] = 0.0  # a token that nothing here makes impossible
    return logits


@each_sampler
@given(data=st.data(), together=st.lists(cases(), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_every_row_of_every_window_gives_the_references_token(
    sampler: Sampler, data: st.DataObject, together: list[Case]
) -> None:
    logits = data.draw(rows_for(together))
    ids = data.draw(st.none() | st.builds(token_map, st.just(VOCAB), st.integers(0, 9)))
    names = None if ids is None else ids.tolist()
    before = logits.copy()
    step = SchedulerOutput(tuple(case.item(str(i)) for i, case in enumerate(together)))
    result = sampler.sample(torch.from_numpy(logits), SamplingBatch.build(step), ids)
    assert np.array_equal(logits, before)
    assert not result.faults
    row = 0
    for case in together:
        for j in range(case.num_samples):
            expected, _ = case.expected(logits[row], j, names)
            assert result.token_ids[row] == expected
            if case.params.num_logprobs is not None:  # of the model's own distribution, whatever was added to it
                raw = reference.logprobs(logits[row].tolist(), expected, case.params.num_logprobs, names)
                assert result.logprobs[row].logprob == pytest.approx(raw.logprob, rel=1e-9, abs=1e-9)
                assert [t for t, _ in result.logprobs[row].top] == [t for t, _ in raw.top]
            row += 1


@given(data=st.data(), case=cases(), num_late=st.integers(0, 8))
@settings(max_examples=200, deadline=None)
def test_a_history_does_not_depend_on_when_its_tokens_came(data: st.DataObject, case: Case, num_late: int) -> None:
    """Appended one by one, with snapshots in between, as at once."""
    at_once = LogitHistory(case.params, case.prompt, case.output, case.stops)
    split = max(0, len(case.output) - num_late)
    bit_by_bit = LogitHistory(case.params, case.prompt, case.output[:split], case.stops)
    for token_id in case.output[split:]:
        bit_by_bit.snapshot(data.draw(st.lists(small_ids, max_size=3)))
        bit_by_bit.append((token_id,))
    assert bit_by_bit.snapshot(case.guesses) == at_once.snapshot(case.guesses)


@given(case=cases())
def test_no_token_has_two_entries_in_a_row(case: Case) -> None:
    adjustments = LogitAdjustments.build([case.item("r")])
    if adjustments is None:
        return
    assert len(adjustments.row_start) == case.num_samples + 1
    for start, stop in zip(adjustments.row_start, adjustments.row_start[1:], strict=False):
        entries = adjustments.token_ids[start:stop].tolist()
        assert len(entries) == len(set(entries))


PLAIN = SamplingParams(max_tokens=1, seed=1)


def test_parameters_that_ask_for_nothing_keep_no_history_and_add_no_entries() -> None:
    assert logit_history(PLAIN, (1, 2), (3,), {0}) is None
    assert LogitAdjustments.build([ScheduledSequence("r", (1,), 0, (0,), 1, PLAIN)]) is None
    history = logit_history(replace(PLAIN, min_tokens=2), (1, 2), (3,), {0})
    assert history is not None
    assert history.snapshot() is not None
    history.append((4,))
    assert history.snapshot() is None  # long enough: from here on it is sampled as it is


def test_the_formula_by_hand() -> None:
    params = replace(
        PLAIN,
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        logit_bias=((2, 3.0), (5, -100.0)),
        min_tokens=4,
    )
    logits = [1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 0.0]
    adjusted = reference.adjusted(
        logits, params, prompt_token_ids=(0, 3), output_token_ids=(2, 3, 2), stop_token_ids={4}
    )
    assert adjusted == [0.5, 1.0, 0.5 + 3 - 1.25, -2 - 0.75, -math.inf, -99.0, 0.0]
    assert reference.adjusted(logits, params, (0, 3), (2, 3, 2, 6), {4})[4] == 1.0


@each_sampler
def test_a_row_in_which_nothing_is_left_is_a_fault_of_its_own_sequence(sampler: Sampler) -> None:
    """A model that can say nothing but a stop token, which min_tokens forbids."""
    only = Case(replace(PLAIN, min_tokens=1), (1,), (), (), frozenset({0}), 1)
    beside = Case(PLAIN, (1,), (), (), frozenset({0}), 1)
    logits = torch.full((2, 5), -math.inf)
    logits[:, 0] = 1.0
    result = sampler.sample(logits, SamplingBatch.build(SchedulerOutput((only.item("a"), beside.item("b")))))
    assert result.faults == {0: RowFault.EMPTY}
    assert result.token_ids[1] == 0


@each_sampler
def test_a_logit_beyond_single_precision_is_a_fault_and_not_another_token(sampler: Sampler) -> None:
    case = Case(replace(PLAIN, repetition_penalty=0.01), (3,), (), (), frozenset(), 1)
    logits = torch.zeros(1, 5)
    logits[0, 3] = 3e38
    result = sampler.sample(logits, SamplingBatch.build(SchedulerOutput((case.item("a"),))))
    assert result.faults == {0: RowFault.INFINITE}
    assert reference.adjusted(logits[0].tolist(), case.params, (3,), ())[3] == math.inf
