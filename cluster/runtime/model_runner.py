"""Runs one scheduled step on a model: rows in, sampled tokens out."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from cluster.config import Device, DType, PoolConfig, Quantization
from cluster.core.step import ScheduledSequence, SchedulerOutput, StepOutput
from cluster.messages.request import SamplingParams
from cluster.runtime.any_model import load_any_model
from cluster.runtime.attention import PLAIN, block_multiple, flash_computes
from cluster.runtime.chain import Chain, Confidence
from cluster.runtime.cuda_capture import CudaCapture
from cluster.runtime.graphed_model import eager_reason, graphed
from cluster.runtime.input_batch import InputBatch
from cluster.runtime.kv_store import HasKV, KVCache, bytes_per_block, num_blocks_for, total_memory
from cluster.runtime.model import Model
from cluster.runtime.model_spec import ModelError
from cluster.runtime.model_store import resolve_model
from cluster.runtime.sampler import Sampler, SamplerOutput, collect_step_output, make_sampler
from cluster.runtime.threads import set_num_threads
from cluster.runtime.work import ShouldStop, never

logger = logging.getLogger(__name__)

DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}


def weight_dtype(pool: PoolConfig, device: torch.device) -> torch.dtype:
    """The dtype of a pool's matrices. Raises ModelError where there are no kernels for it."""
    if pool.quantization is Quantization.NONE:
        return DTYPES[pool.dtype]
    if device.type != "cpu":
        raise ModelError(f"quantization: {pool.quantization.value} is for the CPU only, the device is {device.type}")
    return torch.int8


class ModelRunner:
    """Owns a model and its KV memory; keeps nothing about requests. One thread only."""

    def __init__(self, model: Model, kv: KVCache, sampler: Sampler) -> None:
        self._model = model
        self._kv = kv
        self._sampler = sampler

    @property
    def num_blocks(self) -> int:
        return self._kv.num_blocks

    @property
    def block_size(self) -> int:
        return self._kv.block_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of memory of the KV cache."""
        return self._kv.num_bytes

    @property
    def vocab_size(self) -> int:
        """Token ids that the model reads are below this."""
        return self._model.spec.vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._model.spec.eos_token_ids

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence, output included."""
        return self._model.max_model_len

    def wrap_model(self, wrap: Callable[[Model], Model]) -> None:
        """Put something around the model, to watch it; before the first step."""
        self._model = wrap(self._model)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput, should_stop: ShouldStop = never) -> StepOutput:
        """Compute every row's keys and values and sample where asked.

        Token ids must be below vocab_size and block ids below num_blocks: the scheduler has seen to both.
        """
        batch = InputBatch.build(step, self._kv.block_size, self._model.device)
        sampled = self._run(batch)
        chained = self._run_chain(batch, sampled, step, should_stop) if step.num_chained else ()
        return collect_step_output(step, sampled, chained)

    def _run_chain(
        self, batch: InputBatch, sampled: SamplerOutput, step: SchedulerOutput, should_stop: ShouldStop
    ) -> list[SamplerOutput]:
        chain = Chain.after(batch, step.num_chained, self._kv.block_size, self._model.device)
        passes: list[SamplerOutput] = []
        confidence = Confidence.of(step)
        while confidence.holds_after(sampled) and len(passes) < step.num_chained and not should_stop():
            sampled = self._run(chain.batch(len(passes), sampled.token_ids))
            passes.append(sampled)
        return passes

    def _run(self, batch: InputBatch) -> SamplerOutput:
        logits = self._model.forward(batch, self._kv)
        return self._sampler.sample(logits, batch.sampling, self._model.output_token_ids)

    def warm_up(self, num_tokens: int) -> None:
        """Compile and touch what a prefill of up to num_tokens and a decode step need, so that no request waits for it.

        Writes to block 0 on: only while no sequence holds a block.
        """
        capacity = min(self._kv.num_blocks * self._kv.block_size, self.max_model_len)
        length = max(1, min(num_tokens, capacity - 1))
        for start, count in ((0, length), (length, 1)):
            self.execute(SchedulerOutput((self._dummy(start, count),)))

    def _dummy(self, start: int, count: int) -> ScheduledSequence:
        num_blocks = min(self._kv.num_blocks, -(-(start + count) // self._kv.block_size))
        sampling = SamplingParams(max_tokens=1, seed=0, num_logprobs=1)
        return ScheduledSequence("warm-up", (0,) * count, start, tuple(range(num_blocks)), 1, sampling)


def build_runner(pool: PoolConfig, device: Device, target_path: str | None = None) -> ModelRunner:
    """Load a pool's model, size its KV cache, set this process's thread counts, and warm up.

    target_path: the target's path or name, for a draft that shares its embedding. Raises ModelError.
    """
    where = torch_device(device)
    if where.type == "cpu":
        set_num_threads(pool.num_threads)
    dtype, block_size = DTYPES[pool.dtype], block_size_of(pool, where)
    target = None if target_path is None else resolve_model(target_path)
    model = load_any_model(
        resolve_model(pool.path), weight_dtype(pool, where), where, target, pool.max_model_len, pool.batch_invariant
    )
    check_batch_invariance(pool, model.spec, where)
    num_blocks = num_kv_blocks(pool, bytes_per_block(model.spec, block_size, dtype), model.max_model_len, where)
    reason = eager_reason(pool, model)
    kv = KVCache.allocate(model.spec, num_blocks, block_size, dtype, where, has_padding_block=reason is None)
    graphs = graphed(pool, model, kv) if reason is None else None
    runner = ModelRunner(graphs or model, kv, make_sampler(where))
    runner.warm_up(pool.max_num_batched_tokens)
    if graphs is not None:
        graphs.capture(CudaCapture())
    elif where.type == "cuda":
        logger.info("%s: no CUDA graphs: %s", pool.path, reason)
    return runner


def torch_device(device: Device) -> torch.device:
    """AUTO prefers CUDA. Raises ModelError for CUDA where there is none."""
    if device is Device.CUDA and not torch.cuda.is_available():
        raise ModelError("device: cuda is configured, but this machine has no CUDA device that torch can use")
    use_cuda = device is Device.CUDA or (device is Device.AUTO and torch.cuda.is_available())
    return torch.device("cuda" if use_cuda else "cpu")


def block_size_of(pool: PoolConfig, device: torch.device) -> int:
    """Tokens per KV block. Raises ModelError for a size that the device's attention cannot read."""
    multiple = block_multiple(device, DTYPES[pool.dtype])
    size = max(16, multiple) if pool.block_size is None else pool.block_size
    if size % multiple:
        raise ModelError(f"block_size: on {device.type} {pool.dtype.value} needs a multiple of {multiple}, got {size}")
    return size


def check_batch_invariance(pool: PoolConfig, spec: HasKV, device: torch.device) -> None:
    """Raise ModelError where a pool wants it and attention has nothing that keeps a row's bits from its batch."""
    if not pool.batch_invariant or device.type != "cuda":
        return
    if not all(flash_computes(heads.head_dim, DTYPES[pool.dtype], PLAIN) for heads in spec.kv_heads):
        raise ModelError("batch_invariant: CUDA has it for 16 bits and heads of 8, 16, 24 ... 256 features only")


def num_kv_blocks(pool: PoolConfig, block_bytes: int, max_model_len: int, device: torch.device) -> int:
    """kv_blocks, or what kv_memory_fraction affords, but never more than a full batch of longest sequences.

    Raises ModelError when that is none.
    """
    if pool.kv_blocks is not None:
        return pool.kv_blocks
    most = pool.max_num_seqs * -(-max_model_len // block_size_of(pool, device))
    total = total_memory(device)
    num_blocks = num_blocks_for(pool.kv_memory_fraction, block_bytes, total, most)
    if num_blocks < 1:
        raise ModelError(
            f"kv_memory_fraction {pool.kv_memory_fraction} of {total} bytes of memory holds no KV block "
            f"({block_bytes} bytes each)"
        )
    return num_blocks
