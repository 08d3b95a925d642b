"""A chain of passes gives the tokens, and leaves the keys and values, of a step for each pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from cluster.core.step import ScheduledSequence, SchedulerOutput, StepOutput
from cluster.runtime.input_batch import CPU, InputBatch
from cluster.runtime.kv_store import KVCache
from cluster.runtime.model import Model, load_model
from cluster.runtime.model_runner import ModelRunner
from cluster.runtime.sampler import make_sampler
from tests.chained import run_chain
from tests.fakes import sampling, save_tiny_pair

pytestmark = pytest.mark.integration

BLOCK_SIZE = 4
NUM_BLOCKS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A draft, whose columns are not token ids."""
    models = save_tiny_pair(tmp_path_factory.mktemp("models"))
    return load_model(models / "draft", torch.float32, CPU, models / "target")


class Run:
    """A runner of its own, and its KV."""

    def __init__(self, model: Model) -> None:
        self.kv = KVCache.allocate(model.spec, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)
        self.runner = ModelRunner(model, self.kv, make_sampler(CPU))
        for keys, values in self.kv.layers:
            keys.zero_()
            values.zero_()

    def ids(self, output: StepOutput) -> dict[str, tuple[int, ...]]:
        return {key: found.token_ids for key, found in output.samples.items()}

    def memory(self) -> Tensor:
        return torch.stack([torch.stack(layer) for layer in self.kv.layers])


def sequences() -> Iterator[ScheduledSequence]:
    """Of different lengths and parameters, one of them a part of a prompt, which samples nothing."""
    params = [
        sampling(temperature=0.0),
        sampling(temperature=1.0, seed=3),
        sampling(temperature=0.0),
        sampling(temperature=0.8, seed=2**63 + 5, top_p=0.9, top_k=12, min_p=0.01),
        sampling(temperature=1.5, seed=3),
    ]
    lengths, blocks = (3, 11, 6, 1, 7), iter(range(NUM_BLOCKS - 1, -1, -1))
    for index, (length, asked) in enumerate(zip(lengths, params, strict=True)):
        token_ids = tuple((17 * index + 5 * i) % 60 for i in range(length))
        table = tuple(next(blocks) for _ in range(-(-(length + 9) // BLOCK_SIZE)))
        yield ScheduledSequence(f"r{index}", token_ids, 0, table, int(index != 2), asked)


@pytest.mark.parametrize("num_chained", [1, 3, 8])
def test_a_chain_equals_a_step_for_each_pass(model: Model, num_chained: int) -> None:
    chained, stepped = Run(model), Run(model)
    step = SchedulerOutput(tuple(sequences()), num_chained=num_chained)
    found, wanted = chained.ids(chained.runner.execute(step)), stepped.ids(run_chain(stepped.runner.execute, step))
    assert found == wanted
    assert sorted(found) == ["r0", "r1", "r3", "r4"]
    assert {len(token_ids) for token_ids in found.values()} == {1 + num_chained}
    assert torch.equal(chained.memory(), stepped.memory())


def test_a_chain_goes_on_from_a_decode_step(model: Model) -> None:
    chained, stepped = Run(model), Run(model)
    prompt = next(sequences())
    first = [run.ids(run.runner.execute(SchedulerOutput((prompt,))))["r0"] for run in (chained, stepped)]
    row = ScheduledSequence("r0", first[0], len(prompt.token_ids), prompt.block_table, 1, prompt.sampling)
    step = SchedulerOutput((row,), num_chained=5)
    assert chained.ids(chained.runner.execute(step)) == stepped.ids(run_chain(stepped.runner.execute, step))
    assert torch.equal(chained.memory(), stepped.memory())


@pytest.mark.parametrize("chance", [1e-9, 1e-4, 0.02, 0.5])
def test_a_chain_ends_where_a_sequence_has_become_too_unlikely(model: Model, chance: float) -> None:
    chained, stepped = Run(model), Run(model)
    scored = [replace(item, sampling=replace(item.sampling, num_logprobs=0)) for item in sequences()]
    scored[0] = replace(scored[0], min_logprob=math.log(chance))
    step = SchedulerOutput(tuple(scored), num_chained=8)
    found, wanted = chained.runner.execute(step), run_chain(stepped.runner.execute, step)
    assert found == wanted
    totals = list(accumulate(token.logprob for token in found.samples["r0"].logprobs or ()))
    assert all(total >= math.log(chance) for total in totals[:-1])
    assert len(totals) == 9 or totals[-1] < math.log(chance)


def test_a_chain_ends_when_something_waits(model: Model) -> None:
    asked = iter([False, False, True])
    step = SchedulerOutput(tuple(sequences()), num_chained=8)
    output = Run(model).runner.execute(step, lambda: next(asked))
    assert {len(found.token_ids) for found in output.samples.values()} == {3}


class _Faulty:
    """A model whose `bad_pass`-th pass cannot be sampled in its second sample."""

    def __init__(self, model: Model, bad_pass: int) -> None:
        self._model = model
        self._bad_pass = bad_pass
        self._num_passes = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(self, batch: InputBatch, kv: KVCache) -> Tensor:
        logits = self._model.forward(batch, kv).clone()
        self._num_passes += 1
        if self._num_passes == self._bad_pass:
            logits[1, 5] = torch.nan
        return logits


def test_a_fault_ends_a_chain_and_costs_nobody_a_guess_that_was_made(model: Model) -> None:
    whole, cut = Run(model), Run(model)
    step = SchedulerOutput(tuple(sequences()), num_chained=8)
    wanted = whole.ids(whole.runner.execute(step))
    cut.runner.wrap_model(lambda inner: _Faulty(inner, bad_pass=3))
    output = cut.runner.execute(step)
    assert not output.failed, "the next step meets it again"
    assert cut.ids(output) == {key: ids[: 2 if key == "r1" else 3] for key, ids in wanted.items()}


def test_a_fault_in_the_first_pass_fails_its_sequence_and_starts_no_chain(model: Model) -> None:
    run = Run(model)
    run.runner.wrap_model(lambda inner: _Faulty(inner, bad_pass=1))
    output = run.runner.execute(SchedulerOutput(tuple(sequences()), num_chained=8))
    assert list(output.failed) == ["r1"]
    assert {len(found.token_ids) for found in output.samples.values()} == {1}
