"""`batch_invariant`: a row's logits have the same bits alone, in a window, in a chunk and among 32 others."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cluster.config import Device, DType, PoolConfig
from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.messages.answer import TokenLogprobs
from cluster.messages.request import SamplingParams
from cluster.runtime.layers import FixedRowsLinear, LinearWeights, TorchLayerOps
from cluster.runtime.leader import build_tensor_parallel_runner
from cluster.runtime.model_runner import ModelRunner, build_runner, check_batch_invariance
from cluster.runtime.model_spec import KVHeads, ModelError
from tests.fakes import save_tiny_checkpoint
from tests.paged_run import random_tokens
from tests.tiny_networks import save_network

pytestmark = pytest.mark.integration

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ASKED = SamplingParams(max_tokens=1, seed=0, temperature=0.0, num_logprobs=20)
PROMPT = random_tokens(40)
MAX_LEN = 48


def build(path: Path, device: Device, dtype: DType, batch_invariant: bool = True) -> ModelRunner:
    config = PoolConfig(path=str(path), dtype=dtype, kv_blocks=120, max_model_len=MAX_LEN, max_num_batched_tokens=64)
    return build_runner(config.model_copy(update={"batch_invariant": batch_invariant}), device)


def rows(runner: ModelRunner, name: str, tokens: list[int], start: int, stop: int, place: int) -> ScheduledSequence:
    """Some rows of a sequence, every one of them sampled from."""
    width = -(-MAX_LEN // runner.block_size)
    blocks = tuple(range(place * width, (place + 1) * width))
    return ScheduledSequence(name, tuple(tokens[start:stop]), start, blocks, stop - start, ASKED, stop - start - 1)


def logprobs(runner: ModelRunner, *items: ScheduledSequence) -> tuple[TokenLogprobs, ...]:
    """Of the sequence called "a"."""
    found = runner.execute(SchedulerOutput(items)).samples["a"].logprobs
    assert found is not None
    return found


def one_by_one(runner: ModelRunner) -> tuple[TokenLogprobs, ...]:
    return tuple(logprobs(runner, rows(runner, "a", PROMPT, at, at + 1, 0))[0] for at in range(len(PROMPT)))


@pytest.fixture
def torch_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor on which torch computes bfloat16 products of more than 16 rows, unless it must not."""
    monkeypatch.setattr("cluster.runtime.cpu_layers.default_torch_above_rows", lambda: 16)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *(pytest.param(Device.CPU, dtype, id=f"cpu-{dtype}") for dtype in DType),
        *(pytest.param(Device.CUDA, dtype, id=f"cuda-{dtype}", marks=GPU) for dtype in (DType.BFLOAT16, DType.FLOAT16)),
    ],
)
def test_a_rows_logits_do_not_depend_on_its_batch(
    tmp_path: Path, device: Device, dtype: DType, torch_is_faster: None
) -> None:
    save_tiny_checkpoint(tmp_path)
    runner = build(tmp_path, device, dtype)
    expected = one_by_one(runner)

    chunks = [(0, 3), (3, 30), (30, 31), (31, 40)]
    assert sum((logprobs(runner, rows(runner, "a", PROMPT, *chunk, 1)) for chunk in chunks), ()) == expected

    others = [rows(runner, f"b{i}", random_tokens(40, seed=i), 0, 1 + i % 3, 2 + i) for i in range(31)]
    crowded = [logprobs(runner, *others[:i], rows(runner, "a", PROMPT, i, i + 1, 1), *others[i:])[0] for i in range(20)]
    assert tuple(crowded) == expected[:20]


def test_without_it_bfloat16_follows_the_batch_where_torchs_product_is_the_faster_one(
    tmp_path: Path, torch_is_faster: None
) -> None:
    save_tiny_checkpoint(tmp_path)
    runner = build(tmp_path, Device.CPU, DType.BFLOAT16, batch_invariant=False)
    assert logprobs(runner, rows(runner, "a", PROMPT, 0, len(PROMPT), 0)) != one_by_one(runner)


def test_a_product_always_has_the_same_shape() -> None:
    weight, bias = torch.randn(24, 16), torch.randn(24)
    linear = TorchLayerOps(batch_invariant=True).linear(LinearWeights(weight, bias))
    assert isinstance(linear, FixedRowsLinear)
    many = torch.randn(300, 16)
    whole = linear(many)
    torch.testing.assert_close(whole, many @ weight.T + bias)
    for start, stop in ((0, 1), (0, 300), (127, 129), (290, 300), (7, 7)):
        assert torch.equal(linear(many[start:stop]), whole[start:stop])
    residual = torch.randn(5, 24)
    torch.testing.assert_close(linear(many[:5], residual), whole[:5] + residual)


def test_it_is_refused_where_nothing_promises_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_network(tmp_path, "gpt2")
    with pytest.raises(ModelError, match="batch_invariant: transformers' network does not promise it"):
        build(tmp_path, Device.CPU, DType.FLOAT32)
    monkeypatch.setattr("cluster.runtime.leader.rank_device", lambda *job: torch.device("cuda", 0))
    config = PoolConfig(path="any", tensor_parallel=2, batch_invariant=True)
    with pytest.raises(ModelError, match="batch_invariant: on CUDA tensor_parallel must be 1"):
        build_tensor_parallel_runner(config, Device.CUDA, None, launch=lambda jobs: pytest.fail("a rank was started"))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "has_it"),
    [(DType.BFLOAT16, 64, True), (DType.FLOAT16, 256, True), (DType.FLOAT32, 64, False), (DType.BFLOAT16, 12, False)],
)
def test_on_cuda_it_is_refused_where_attention_is_not_flash_attentions(
    dtype: DType, head_dim: int, has_it: bool
) -> None:
    pool, spec = (
        PoolConfig(path="any", dtype=dtype, batch_invariant=True),
        SimpleNamespace(kv_heads=(KVHeads(2, head_dim),)),
    )
    check_batch_invariance(pool, spec, torch.device("cpu"))
    with nullcontext() if has_it else pytest.raises(ModelError, match="batch_invariant: CUDA has it for 16 bits"):
        check_batch_invariance(pool, spec, torch.device("cuda"))
