"""A step's sampling parameters, laid out per sampled row."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.messages.request import SamplingParams
from cluster.runtime.sampling_batch import NO_TOP_K, SamplingBatch

pytestmark = pytest.mark.unit


def scheduled(request_id: str, tokens: int, start: int, samples: int, params: SamplingParams) -> ScheduledSequence:
    return ScheduledSequence(
        request_id, tuple(range(tokens)), start, (0,), samples, params, num_draft_tokens=max(samples - 1, 0)
    )


def test_every_sampled_row_gets_its_sequences_parameters_and_its_own_position() -> None:
    greedy = SamplingParams(max_tokens=8, seed=2**64 - 1, temperature=0.0)
    warm = SamplingParams(max_tokens=8, seed=7, temperature=0.7, top_p=0.9, top_k=40, min_p=0.05)
    batch = SamplingBatch.build(
        SchedulerOutput(
            (
                scheduled("prefill-end", tokens=5, start=0, samples=1, params=greedy),
                scheduled("prefill-middle", tokens=3, start=4, samples=0, params=warm),
                scheduled("verify", tokens=4, start=10, samples=4, params=warm),
            )
        )
    )
    assert batch.num_rows == 5
    assert batch.position.tolist() == [5, 11, 12, 13, 14]
    assert batch.seed.tolist() == [2**64 - 1, 7, 7, 7, 7]
    assert batch.seed.dtype == np.uint64
    assert batch.temperature.tolist() == [0.0, 0.7, 0.7, 0.7, 0.7]
    assert batch.top_p.tolist() == [1.0, 0.9, 0.9, 0.9, 0.9]
    assert batch.top_k.tolist() == [NO_TOP_K, 40, 40, 40, 40]
    assert batch.min_p.tolist() == [0.0, 0.05, 0.05, 0.05, 0.05]
    assert batch.logprob_rows.size == 0


def test_only_rows_that_ask_for_logprobs_are_listed() -> None:
    plain = SamplingParams(max_tokens=8, seed=1)
    chosen_only = SamplingParams(max_tokens=8, seed=1, num_logprobs=0)
    top_five = SamplingParams(max_tokens=8, seed=1, num_logprobs=5)
    batch = SamplingBatch.build(
        SchedulerOutput(
            (
                scheduled("a", 1, 3, 1, chosen_only),
                scheduled("b", 2, 3, 2, plain),
                scheduled("c", 2, 3, 2, top_five),
            )
        )
    )
    assert batch.logprob_rows.tolist() == [0, 3, 4]
    assert batch.num_logprobs.tolist() == [0, 5, 5]


def test_a_step_that_samples_nothing_has_no_rows() -> None:
    params = SamplingParams(max_tokens=8, seed=1, num_logprobs=3)
    batch = SamplingBatch.build(SchedulerOutput((scheduled("a", 3, 0, 0, params),)))
    assert batch.num_rows == 0
    assert batch.position.dtype == np.int64
    assert batch.logprob_rows.size == 0
