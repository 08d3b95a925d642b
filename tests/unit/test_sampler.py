"""What a sampler does with a row: greedy limits, ties, filters, impossible tokens, faults, logprobs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from cluster.core import sampling as reference
from cluster.core.sampling import InvalidLogits, RowFault
from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.messages.request import SamplingParams
from cluster.runtime.sampler import Sampler, SamplerOutput, collect_step_output, make_sampler
from cluster.runtime.sampler_cpu import CpuSampler
from cluster.runtime.sampler_torch import TorchSampler
from cluster.runtime.sampling_batch import SamplingBatch
from tests.fakes import sampling_batch

pytestmark = pytest.mark.unit

INF = math.inf
SAMPLERS: dict[str, Sampler] = {"cpu": CpuSampler(), "torch": TorchSampler()}
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)


def params(seed: int = 0, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, seed=seed, **fields)  # type: ignore[arg-type]


def sample(
    sampler: Sampler, logits: Sequence[Sequence[float]], how: SamplingParams, ids: list[int] | None = None
) -> SamplerOutput:
    """Sample rows that share their parameters, at positions 1, 2, …"""
    batch = sampling_batch([how] * len(logits), range(1, len(logits) + 1))
    return sampler.sample(torch.tensor(logits), batch, None if ids is None else torch.tensor(ids))


def drawn(sampler: Sampler, row: Sequence[float], how: SamplingParams, ids: list[int] | None = None) -> set[int]:
    """Every token that comes up in 500 positions."""
    return set(sample(sampler, [row] * 500, how, ids).token_ids.tolist())


def distinct_rows(num_rows: int, vocab: int) -> torch.Tensor:
    """Rows whose logits are a shuffled range with steps of 1/16, so that none are close to equal."""
    rng = np.random.default_rng(0)
    return torch.from_numpy(np.stack([rng.permutation(vocab) / 16 for _ in range(num_rows)]).astype(np.float32))


# --- greedy ----------------------------------------------------------------------------------------------------------


GREEDY_LIMITS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 1e-7},
    {"temperature": 1e-4},
    {"top_k": 1},
    {"min_p": 1.0},
    {"top_p": 1e-9},
]


@each_sampler
@pytest.mark.parametrize("how", GREEDY_LIMITS, ids=str)
def test_greedy_is_the_limit_of_temperature_and_of_every_filter(sampler: Sampler, how: dict[str, float]) -> None:
    logits = distinct_rows(200, 300)
    result = sampler.sample(logits, sampling_batch([params(seed=3, **how)] * 200, range(1, 201)))
    assert result.token_ids.tolist() == logits.argmax(dim=1).tolist()


@each_sampler
def test_greedy_takes_the_lowest_token_id_of_equals(sampler: Sampler) -> None:
    greedy = params(temperature=0.0)
    row = [0.0, 3.0, -1.0, 3.0] + [0.0] * 200 + [3.0]
    assert drawn(sampler, row, greedy) == {1}
    assert drawn(sampler, [-0.0, 0.0], greedy) == {0}
    assert drawn(sampler, [1.0, 3.0, 3.0], greedy, ids=[9, 8, 2]) == {2}


@each_sampler
def test_greedy_ignores_the_seed_and_the_filters(sampler: Sampler) -> None:
    logits = distinct_rows(1, 100)
    for how in (params(seed=1, temperature=0.0), params(seed=2, temperature=0.0, top_k=3, top_p=0.1, min_p=0.5)):
        assert sampler.sample(logits, sampling_batch([how], [1])).token_ids[0] == logits.argmax()


# --- filters ---------------------------------------------------------------------------------------------------------

# Probabilities 1/2, 1/4, 1/8, 1/16, 1/16 at temperature 1, in a scrambled order.
HALVES = [math.log(p) for p in (1 / 16, 1 / 4, 1 / 2, 1 / 16, 1 / 8)]


@each_sampler
@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 4}, {0, 1, 2, 4}),  # of the two last, equally likely ones the lower id
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.49}, {2}),
        ({"top_p": 0.51}, {1, 2}),
        ({"top_p": 0.9}, {0, 1, 2, 4}),
        ({"top_p": 0.95}, {0, 1, 2, 3, 4}),
        ({"min_p": 0.3}, {1, 2}),
        ({"min_p": 0.2}, {1, 2, 4}),
        ({"top_k": 2, "top_p": 0.6}, {2}),  # 2/3 and 1/3 are left after top_k
        ({"top_k": 2, "top_p": 0.7}, {1, 2}),
        ({"min_p": 0.2, "top_k": 5, "top_p": 0.85}, {1, 2}),  # 4/7 + 2/7 = .857
        ({"min_p": 0.2, "top_k": 5, "top_p": 0.86}, {1, 2, 4}),
        ({"temperature": 0.5, "top_p": 0.85}, {1, 2}),  # 64 : 16 : 4 : 1 : 1, of 86; 80/86 = .93, 64/86 = .74
        ({"temperature": 2.0, "min_p": 0.6}, {1, 2}),  # the root of a half is .71, of a quarter .5
    ],
    ids=str,
)
def test_filters_keep_exactly_what_their_definition_says(
    sampler: Sampler, how: dict[str, float], kept: set[int]
) -> None:
    assert drawn(sampler, HALVES, params(seed=5, **{"temperature": 1.0, **how})) == kept
    assert set(reference.kept_weights(HALVES, params(**{"temperature": 1.0, **how}))) == kept


@each_sampler
def test_ties_at_a_cut_go_to_the_lowest_token_ids(sampler: Sampler) -> None:
    flat = [0.0] * 130
    assert drawn(sampler, flat, params(top_k=5)) == {0, 1, 2, 3, 4}
    assert drawn(sampler, flat, params(top_p=3 / 130)) == {0, 1, 2}
    assert drawn(sampler, [0.0] * 4, params(top_k=2), ids=[7, 3, 5, 1]) == {1, 3}
    assert drawn(sampler, [0.0] * 4, params(top_p=0.5), ids=[7, 3, 5, 1]) == {1, 3}


@each_sampler
def test_impossible_tokens_are_never_sampled(sampler: Sampler) -> None:
    row = [-INF] * 70 + [0.0, -INF, 1.0] + [-INF] * 70
    for how in (params(), params(temperature=0.0), params(top_k=10), params(top_p=0.99), params(min_p=0.01)):
        assert drawn(sampler, row, how) <= {70, 72}
    assert drawn(sampler, row, params(temperature=3.0)) == {70, 72}


@each_sampler
def test_a_vocabulary_of_one_is_always_that_one(sampler: Sampler) -> None:
    assert drawn(sampler, [-3.0], params(top_p=0.5, top_k=4, min_p=0.3)) == {0}


@each_sampler
def test_another_seed_or_position_gives_another_sample(sampler: Sampler) -> None:
    row = [0.0] * 1000
    tokens = sample(sampler, [row] * 50, params(seed=1)).token_ids
    assert len(set(tokens.tolist())) > 40
    assert (tokens != sample(sampler, [row] * 50, params(seed=2)).token_ids).sum() > 40
    assert (tokens == sample(sampler, [row] * 50, params(seed=1)).token_ids).all()


# --- faults ----------------------------------------------------------------------------------------------------------

FAULTY = {
    RowFault.NAN: [0.0, math.nan, 1.0],
    RowFault.INFINITE: [0.0, INF, 1.0],
    RowFault.EMPTY: [-INF, -INF, -INF],
}


@each_sampler
@pytest.mark.parametrize("how", [{"temperature": 0.0}, {}, {"top_p": 0.9, "top_k": 2, "min_p": 0.1}], ids=str)
def test_a_faulty_row_is_reported_and_the_others_are_sampled(sampler: Sampler, how: dict[str, float]) -> None:
    good = [0.0, 9.0, 1.0]
    rows = [good, *FAULTY.values(), good]
    result = sample(sampler, rows, params(seed=6, num_logprobs=1, **how))
    assert result.faults == dict(zip((1, 2, 3), FAULTY, strict=True))
    assert set(result.logprobs) == {0, 4}
    assert result.token_ids[[0, 4]].tolist() == [1, 1]


@each_sampler
def test_a_single_nan_is_found_anywhere(sampler: Sampler) -> None:
    rows = torch.zeros(3, 200)
    rows[0, 0], rows[1, 150], rows[2, 199] = math.nan, -math.nan, math.nan
    rows[0, 5] = INF
    batch = sampling_batch([params()] * 3, [1, 2, 3])
    assert sampler.sample(rows, batch).faults == dict.fromkeys(range(3), RowFault.NAN)


@pytest.mark.parametrize("fault", FAULTY, ids=str)
def test_the_reference_names_the_fault(fault: RowFault) -> None:
    with pytest.raises(InvalidLogits, match="cannot sample") as raised:
        reference.sample(FAULTY[fault], params(), 1)
    assert raised.value.fault is fault


# --- logprobs --------------------------------------------------------------------------------------------------------


@each_sampler
def test_logprobs_are_those_of_the_unfiltered_distribution_at_temperature_one(sampler: Sampler) -> None:
    logits = torch.randn(20, 3000, generator=torch.Generator().manual_seed(1)) * 4
    how = params(seed=4, temperature=0.5, top_k=7, top_p=0.8, num_logprobs=12)
    result = sampler.sample(logits, sampling_batch([how] * 20, range(1, 21)))
    expected = logits.double().log_softmax(dim=1)
    for row in range(20):
        given = result.logprobs[row]
        assert given.token_id == result.token_ids[row]
        assert given.logprob == pytest.approx(expected[row, given.token_id].item(), abs=1e-6)
        values, tokens = expected[row].topk(12)
        assert [token for token, _ in given.top] == tokens.tolist()
        assert [value for _, value in given.top] == pytest.approx(values.tolist(), abs=1e-6)


@each_sampler
def test_more_logprobs_than_possible_tokens_gives_those_there_are(sampler: Sampler) -> None:
    result = sample(sampler, [[0.0, -INF, 0.0]], params(num_logprobs=5))
    assert [token for token, _ in result.logprobs[0].top] == [0, 2]
    assert [value for _, value in result.logprobs[0].top] == pytest.approx([-math.log(2)] * 2)


@each_sampler
def test_only_the_chosen_tokens_logprob_is_given_when_none_other_is_asked_for(sampler: Sampler) -> None:
    result = sample(sampler, [[0.0, 0.0]], params(num_logprobs=0))
    assert result.logprobs[0].top == ()
    assert result.logprobs[0].logprob == pytest.approx(-math.log(2))
    assert not sample(sampler, [[0.0, 0.0]], params()).logprobs


# --- shapes and steps ------------------------------------------------------------------------------------------------


@each_sampler
def test_arguments_that_do_not_fit_are_refused(sampler: Sampler) -> None:
    batch = sampling_batch([params()] * 2, [1, 2])
    for logits in (torch.zeros(3, 5), torch.zeros(2, 5).double(), torch.zeros(5), torch.zeros(2, 0)):
        with pytest.raises(ValueError, match="logits"):
            sampler.sample(logits, batch)
    with pytest.raises(ValueError, match=r"\[4\] token ids for 5 columns"):
        sampler.sample(torch.zeros(2, 5), batch, torch.arange(4))


@each_sampler
def test_no_rows_give_no_tokens(sampler: Sampler) -> None:
    result = sampler.sample(torch.zeros(0, 5), SamplingBatch.build(SchedulerOutput()))
    assert result.token_ids.tolist() == []
    assert not result.faults


@each_sampler
def test_rows_may_be_a_view_and_are_left_as_they_were(sampler: Sampler) -> None:
    storage = torch.randn(6, 100, generator=torch.Generator().manual_seed(2))
    before, batch = storage.clone(), sampling_batch([params(top_p=0.9)] * 3, [1, 2, 3])
    result = sampler.sample(storage[::2, 10:90], batch)
    assert result.token_ids.tolist() == sampler.sample(storage[::2, 10:90].contiguous(), batch).token_ids.tolist()
    assert torch.equal(storage, before)


def test_one_sampler_reads_logits_of_several_vocabularies_in_turn() -> None:
    sampler, row = TorchSampler(), [0.0, 3.0, 1.0]
    greedy = params(temperature=0.0)
    shuffled, others = torch.tensor([5, 0, 2]), torch.tensor([7, 9, 8])
    for ids, best in ((None, 1), (shuffled, 0), (others, 9), (others, 9), (None, 1)):
        logits = torch.tensor([row])
        assert sampler.sample(logits, sampling_batch([greedy], [4]), ids).token_ids.tolist() == [best]
    assert sampler.sample(torch.tensor([[*row, 4.0]]), sampling_batch([greedy], [4])).token_ids.tolist() == [3]


def test_the_sampler_is_chosen_by_device() -> None:
    assert isinstance(make_sampler(torch.device("cpu")), CpuSampler)
    assert isinstance(make_sampler(torch.device("meta")), TorchSampler)


def test_a_sequence_with_a_faulty_row_fails_and_its_neighbours_get_their_samples() -> None:
    def item(name: str, samples: int, num_logprobs: int | None = None) -> ScheduledSequence:
        return ScheduledSequence(name, (0,) * max(samples, 1), 4, (0,), samples, params(num_logprobs=num_logprobs))

    step = SchedulerOutput((item("a", 2, num_logprobs=1), item("prefill", 0), item("bad", 2), item("b", 1)))
    logits = torch.tensor([[5.0, 0.0], [0.0, 5.0], [0.0, 5.0], [math.nan, 5.0], [0.0, 90.0]])
    sampled = CpuSampler().sample(logits, SamplingBatch.build(step))
    output = collect_step_output(step, sampled)
    assert output.failed == {"bad": "the model's output cannot be sampled: a logit is NaN"}
    assert set(output.samples) == {"a", "b"}
    assert output.samples["a"].token_ids == tuple(sampled.token_ids[:2].tolist())
    assert output.samples["a"].logprobs == (sampled.logprobs[0], sampled.logprobs[1])
    assert output.samples["b"].token_ids == (1,)
    assert output.samples["b"].logprobs is None
