"""The sampler for GPU rows gives the CPU's tokens."""

from __future__ import annotations

import pytest
import torch

from cluster.core.logit_history import LogitHistory
from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.messages.request import SamplingParams
from cluster.runtime.sampler import make_sampler
from cluster.runtime.sampling_batch import SamplingBatch
from tests.fakes import sampling_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODES = [{"temperature": 0.0}, {}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05, "top_p": 0.95}]


@pytest.mark.parametrize("reduced", [False, True])
def test_rows_on_the_gpu_become_the_same_tokens_as_on_the_cpu(reduced: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(60, 49_152, generator=generator) * 3
    logits[:, ::7] = logits[:, ::7].round()  # ties
    ids = torch.randperm(60_000, generator=generator)[:49_152] if reduced else None
    params = [SamplingParams(max_tokens=1, seed=i, num_logprobs=5, **MODES[i % len(MODES)]) for i in range(60)]  # type: ignore[arg-type]
    batch = sampling_batch(params, range(1, 61))
    on_cpu = make_sampler(torch.device("cpu")).sample(logits, batch, ids)
    cuda = torch.device("cuda")
    on_gpu = make_sampler(cuda).sample(logits.to(cuda), batch, None if ids is None else ids.to(cuda))
    assert on_gpu.token_ids.tolist() == on_cpu.token_ids.tolist()
    for row in range(60):
        assert on_gpu.logprobs[row].logprob == pytest.approx(on_cpu.logprobs[row].logprob, abs=1e-6)
        assert [t for t, _ in on_gpu.logprobs[row].top] == [t for t, _ in on_cpu.logprobs[row].top]


@pytest.mark.parametrize("reduced", [False, True])
def test_windows_with_penalties_become_the_same_tokens_as_on_the_cpu(reduced: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(48, 49_152, generator=generator) * 3
    logits[:, :40] += 12  # tokens that the windows repeat are among the likely ones
    ids = torch.randperm(60_000, generator=generator)[:49_152] if reduced else None
    step = SchedulerOutput(tuple(_window(index) for index in range(8)))
    batch = SamplingBatch.build(step)
    on_cpu = make_sampler(torch.device("cpu")).sample(logits, batch, ids)
    cuda = torch.device("cuda")
    on_gpu = make_sampler(cuda).sample(logits.to(cuda), batch, None if ids is None else ids.to(cuda))
    assert on_gpu.token_ids.tolist() == on_cpu.token_ids.tolist()


def _window(index: int) -> ScheduledSequence:
    """Six rows: a committed token and five guesses."""
    params = SamplingParams(
        max_tokens=1,
        seed=index,
        frequency_penalty=0.3 * index,
        presence_penalty=0.5,
        repetition_penalty=1.3,
        logit_bias=((index, -100.0), (40_000, 5.0)),
        min_tokens=9,
        **MODES[index % len(MODES)],  # type: ignore[arg-type]
    )
    guesses = tuple(range(index, index + 5))
    history = LogitHistory(params, range(20), range(10, 17), {1, 2}).snapshot(guesses)
    return ScheduledSequence(str(index), (9, *guesses), 26, (0,), 6, params, 5, history)
