"""The sampler for GPU rows gives the CPU's tokens."""

from __future__ import annotations

import pytest
import torch

from cluster.messages import SamplingParams
from cluster.runtime.sampler import make_sampler
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
