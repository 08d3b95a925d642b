"""A decoder's step on a CUDA device, as far as shapes, types and devices go: without one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.messages.request import SamplingParams
from cluster.runtime.graph_shapes import GraphShapes
from cluster.runtime.input_batch import CPU, InputBatch
from cluster.runtime.kv_store import KVCache
from cluster.runtime.static_batch import StaticBatches
from tests.fake_cuda import CUDA, Checkpoint, fake_batch, fake_cuda, flash_attention, on_fake_cuda
from tests.fakes import save_tiny_checkpoint

pytestmark = pytest.mark.unit

SAMPLING = SamplingParams(max_tokens=1, seed=0)


def ragged_step(block_size: int) -> InputBatch:
    """A prefill chunk, a decode row and a verification."""
    items = (
        ScheduledSequence("prefill", (1,) * 20, 0, (3,), 0, SAMPLING),
        ScheduledSequence("decode", (1,), 12, (0, 5), 1, SAMPLING),
        ScheduledSequence("verify", (1,) * 5, 9, (4, 2), 5, SAMPLING, num_draft_tokens=4),
    )
    return InputBatch.build(SchedulerOutput(items), block_size)


@pytest.fixture(autouse=True)
def checked_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.runtime.attention.cuda.varlen_attn", flash_attention)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_step_stays_on_the_device_and_waits_for_nothing(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    save_tiny_checkpoint(tmp_path, family)
    checkpoint, batch = Checkpoint.read(tmp_path, dtype), ragged_step(256)
    with fake_cuda(), torch.inference_mode():
        model, kv = checkpoint.load(num_blocks=6, block_size=256)
        logits = model.forward(fake_batch(batch.host, batch.sampling), kv)
    assert (logits.shape, logits.dtype, logits.device) == ((6, 97), torch.float32, CUDA)


def test_the_device_would_notice_a_value_that_is_read_back() -> None:
    batch = ragged_step(256)
    with fake_cuda(), pytest.raises(Exception, match="_local_scalar_dense"):
        fake_batch(batch.host, batch.sampling).context_len[0].item()


def test_the_device_would_notice_an_index_on_the_host() -> None:
    batch = ragged_step(256)
    with fake_cuda(), pytest.raises(AssertionError, match="an index on cpu"):
        fake_batch(batch.host, batch.sampling).positions[torch.zeros(3, dtype=torch.int64)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_what_is_captured_reads_no_value_and_keeps_its_shapes(
    tmp_path: Path, dtype: torch.dtype, batch_invariant: bool
) -> None:
    save_tiny_checkpoint(tmp_path)
    checkpoint = Checkpoint.read(tmp_path, dtype)
    shapes = GraphShapes.of(max_num_seqs=8, max_num_tokens=64, max_model_len=256, block_size=256)
    on_host = KVCache.allocate(checkpoint.spec, 6, 256, dtype, CPU, has_padding_block=True)
    static = StaticBatches.allocate(shapes, on_host, CPU)
    for shape in shapes.shapes:
        batch = static.batch(shape)
        unreadable = replace(batch, host=None)  # a value of the host would be that of the capture for ever
        with fake_cuda(), torch.inference_mode():
            model, kv = checkpoint.load(num_blocks=7, block_size=256, batch_invariant=batch_invariant)
            logits = model.forward(on_fake_cuda(unreadable), kv)
        assert (logits.shape, logits.device) == ((shape.num_tokens, 97), CUDA)
