"""Both samplers under masks against the reference, with a draft's few columns too."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import sampling as reference
from cluster.core.grammar import TokenMask
from cluster.core.logit_history import logit_history
from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.runtime.sampler import collect_step_output
from cluster.runtime.sampler_cpu import CpuSampler
from cluster.runtime.sampler_torch import TorchSampler
from cluster.runtime.sampling_batch import SamplingBatch
from tests.fakes import sampling

pytestmark = pytest.mark.property

VOCAB = 70
each_sampler = pytest.mark.parametrize("sampler", [CpuSampler(), TorchSampler()], ids=lambda s: type(s).__name__)


def mask_of(token_ids: set[int], num_words: int = 3) -> TokenMask:
    return TokenMask(sum(1 << i for i in token_ids).to_bytes(4 * num_words, "little"), bool(token_ids))


@st.composite
def sequences(draw: st.DrawFn) -> tuple[ScheduledSequence, list[TokenMask | None]]:
    num_samples = draw(st.integers(1, 3))
    allowed = st.sets(st.integers(0, VOCAB - 1))
    masks = draw(st.none() | st.lists(allowed, min_size=num_samples, max_size=num_samples))
    params = sampling(temperature=draw(st.sampled_from([0.0, 1.0])), top_p=draw(st.sampled_from([1.0, 0.5])))
    bits = None if masks is None else b"".join(mask_of(item).bits for item in masks)
    item = ScheduledSequence("", (1,) * num_samples, 4, (0, 1), num_samples, params, token_masks=bits)
    return item, [None] * num_samples if masks is None else [mask_of(allowed) for allowed in masks]


@each_sampler
@given(st.lists(sequences(), min_size=1, max_size=4), st.booleans(), st.integers(0, 2**32 - 1))
def test_a_row_becomes_what_the_reference_makes_of_it(sampler: object, drawn: list, is_draft: bool, seed: int) -> None:
    chance = np.random.default_rng(seed)
    ids = chance.permutation(VOCAB)[:40] if is_draft else None
    items = [ScheduledSequence(str(n), *_fields(item)) for n, (item, _) in enumerate(drawn)]
    step = SchedulerOutput(tuple(items))
    num_rows = sum(item.num_samples for item in items)
    logits = chance.normal(size=(num_rows, VOCAB if ids is None else len(ids)), scale=3).astype(np.float32)
    given_ids = None if ids is None else torch.from_numpy(ids)
    sampled = sampler.sample(torch.from_numpy(logits), SamplingBatch.build(step), given_ids)
    output = collect_step_output(step, sampled)
    rows = iter(logits.tolist())
    for item, (_, masks) in zip(items, drawn, strict=True):
        expected = [right_token(next(rows), item, offset, mask, ids) for offset, mask in enumerate(masks)]
        if None in expected:
            assert item.request_id in output.stuck
            assert item.request_id not in output.samples
        else:
            assert output.samples[item.request_id].token_ids == tuple(expected)
    assert output.failed == {}


def _fields(item: ScheduledSequence) -> tuple:
    return item.token_ids, item.start, item.block_table, item.num_samples, item.sampling, 0, None, item.token_masks


def right_token(
    logits: list[float], item: ScheduledSequence, offset: int, mask: TokenMask | None, ids: np.ndarray | None
) -> int | None:
    token_ids = None if ids is None else ids.tolist()
    changed = logits if mask is None else reference.masked(logits, mask, token_ids)
    if max(changed) == -math.inf:
        return None
    return reference.sample(changed, item.sampling, item.start + offset + 1, token_ids)


@each_sampler
def test_a_bias_cannot_lift_what_a_mask_forbids_and_log_probabilities_are_the_models_own(sampler: object) -> None:
    params = sampling(temperature=0.0, logit_bias=((5, 100.0),), num_logprobs=1)
    history = logit_history(params, (1,), (), ())
    assert history is not None
    mask = mask_of({6, 7})
    item = ScheduledSequence("r", (1,), 0, (0,), 1, params, 0, history.snapshot(), mask.bits)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 1.0
    logits[0, 5] = 2.0
    step = SchedulerOutput((item,))
    output = collect_step_output(step, sampler.sample(logits, SamplingBatch.build(step)))
    sampled = output.samples["r"]
    assert sampled.token_ids == (7,)
    assert sampled.logprobs is not None
    assert sampled.logprobs[0].top[0][0] == 5  # unmasked
