"""Rank 0 of a replica: tells the others each step, and notices when one of them is lost."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from cluster.config import Device, PoolConfig
from cluster.runtime.any_model import spec_for_ranks
from cluster.runtime.graphed_model import eager_reason
from cluster.runtime.input_batch import HostRows, InputBatch
from cluster.runtime.kv_store import KVCache, bytes_per_block
from cluster.runtime.model_runner import DTYPES, ModelRunner, block_size_of, num_kv_blocks
from cluster.runtime.model_spec import ModelError, ModelSpec
from cluster.runtime.model_store import resolve_model
from cluster.runtime.ranks import (
    LOAD_TIMEOUT_S,
    Launcher,
    RankJob,
    Ranks,
    load_rank,
    rank_device,
    ready_key,
    release,
    rendezvous_file,
)
from cluster.runtime.sampler import make_sampler
from cluster.runtime.sharded_model import ShardedModel
from cluster.runtime.sharding import Shard
from cluster.runtime.step_frame import FRAME_WORDS, FrameKind, Words, encode_signal, encode_step
from cluster.runtime.tensor_parallel import COLLECTIVE_TIMEOUT_S, TPGroup
from cluster.runtime.work import RunnerLost

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0  # between two looks at the other ranks; well below COLLECTIVE_TIMEOUT_S
_READY_POLL_S = 0.05
_STOP_TIMEOUT_S = 2.0  # for ranks to end by themselves


class Leader:
    """Owns the other ranks and the order of what they are told. Lost once, it stays lost.

    `on_lost` is called once, from any thread, when a rank is found dead or silent.
    """

    def __init__(self, group: TPGroup, ranks: Ranks) -> None:
        self.on_lost: Callable[[Exception], None] | None = None
        self._group = group
        self._ranks = ranks
        self._number = 0
        self._talking = threading.Lock()  # held from a frame until all ranks are through with it
        self._ending = threading.Lock()
        self._lost: RunnerLost | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="paceline-ranks", daemon=True).start()

    def step(self, rows: HostRows, compute: Callable[[], Tensor]) -> Tensor:
        """Have every rank compute a step's rows; `compute` is this rank's part. Raises RunnerLost."""
        with self._talking:
            self._check()
            try:
                self._tell(encode_step(rows, self._number))
                return compute()
            except Exception as error:
                # Ranks that stand at different places of a step can never meet again, whatever the cause.
                self._lose(f"a step of the tensor-parallel group failed: {error}")
                raise RunnerLost(str(self._lost)) from error

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        with self._talking:
            if self._lost is None and not self._closed.is_set():
                self._closed.set()
                self._dismiss()
        self._ranks.kill()

    def _dismiss(self) -> None:
        try:
            self._tell(encode_signal(FrameKind.STOP, self._number))
            self._ranks.wait(_STOP_TIMEOUT_S)
        except RuntimeError as error:
            logger.warning("a rank of the tensor-parallel group did not hear that it may stop: %s", error)

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost
        if self._closed.is_set():
            raise RunnerLost("the tensor-parallel group is closed")

    def _tell(self, words: Words) -> None:
        self._number += 1
        self._group.tell(words[:FRAME_WORDS])
        if len(words) > FRAME_WORDS:
            self._group.tell(np.ascontiguousarray(words[FRAME_WORDS:]))

    def _watch(self) -> None:
        while self._lost is None and not self._closed.wait(WATCH_INTERVAL_S):
            if (failure := self._ranks.failure()) is not None:
                self._lose(failure)
            elif self._talking.acquire(blocking=False):  # else a step is under way, which is as good
                try:
                    self._ping()
                finally:
                    self._talking.release()

    def _ping(self) -> None:
        if self._lost is not None or self._closed.is_set():
            return
        try:
            self._tell(encode_signal(FrameKind.PING, self._number))
            self._group.await_answers()
        except RuntimeError as error:
            self._lose(f"a rank of the tensor-parallel group does not answer: {error}")

    def _lose(self, reason: str) -> None:
        """Break the whole group up, so that no rank waits for another any more."""
        with self._ending:
            if self._lost is not None or self._closed.is_set():
                return
            self._lost = RunnerLost(reason)
        logger.error("%s", reason)
        self._ranks.kill()
        self._group.abort()
        if self.on_lost is not None:
            self.on_lost(self._lost)


class LedModel:
    """The whole group as one model."""

    def __init__(self, leader: Leader, own: ShardedModel) -> None:
        self.spec = own.spec
        self.device = own.device
        self.max_model_len = own.max_model_len
        self.output_token_ids = own.output_token_ids
        self.weight_bytes = own.weight_bytes
        self._leader = leader
        self._own = own

    def forward(self, batch: InputBatch, kv: KVCache) -> Tensor:
        """See Model.forward. Raises RunnerLost when the group is broken."""
        return self._leader.step(batch.host, lambda: self._own.forward(batch, kv))


class TensorParallelRunner(ModelRunner):
    """A runner whose model is a group of ranks, which it owns.

    weight_bytes: resident bytes of each rank's weights, in order.
    """

    def __init__(self, model: LedModel, kv: KVCache, leader: Leader, weight_bytes: tuple[int, ...]) -> None:
        super().__init__(model, kv, make_sampler(model.device))
        self.leader = leader
        self.weight_bytes = weight_bytes


def build_tensor_parallel_runner(
    pool: PoolConfig,
    device: Device,
    target_path: str | None,
    launch: Launcher,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
) -> TensorParallelRunner:
    """Start the other ranks, load this one's part, and join. Raises ModelError, RunnerLost.

    timeout_s: longest silence of a rank. Everything that is learned of the model is learned here; the others are told.
    """
    where = rank_device(device, 0, pool.tensor_parallel)
    if pool.batch_invariant and where.type == "cuda":
        raise ModelError("batch_invariant: on CUDA tensor_parallel must be 1, sums over ranks follow the batch's shape")
    num_blocks = _num_blocks(pool, where)
    with tempfile.TemporaryDirectory(prefix="paceline-ranks-") as folder:
        job = RankJob(pool, device, target_path, num_blocks, 0, rendezvous_file(folder), timeout_s)
        ranks = launch([replace(job, rank=rank) for rank in range(1, job.size)])
        try:
            return _join(job, ranks)
        except BaseException:
            ranks.kill()
            raise


def _join(job: RankJob, ranks: Ranks) -> TensorParallelRunner:
    store, own = job.store(), load_rank(job)
    weight_bytes = (own.model.weight_bytes, *_await_ready(job, store, ranks))
    release(store)
    own.group.join(store, job.timeout_s)
    leader = Leader(own.group, ranks)
    runner = TensorParallelRunner(LedModel(leader, own.model), own.kv, leader, weight_bytes)
    runner.warm_up(1)  # the first words between the ranks
    if own.model.device.type == "cuda":
        logger.info("%s: no CUDA graphs: %s", job.pool.path, eager_reason(job.pool, own.model))
    logger.info("%d ranks hold %s bytes of weights", job.size, weight_bytes)
    return runner


def _await_ready(job: RankJob, store: Store, ranks: Ranks) -> list[int]:
    """The bytes of the other ranks' weights, when all have loaded."""
    keys = [ready_key(rank) for rank in range(1, job.size)]
    deadline = time.monotonic() + LOAD_TIMEOUT_S
    while not store.check(keys):
        if (failure := ranks.failure()) is not None:
            raise RunnerLost(failure)
        if time.monotonic() > deadline:
            raise RunnerLost(f"the ranks of the tensor-parallel group did not load within {LOAD_TIMEOUT_S:.0f} s")
        time.sleep(_READY_POLL_S)
    return [int(store.get(key)) for key in keys]


def _num_blocks(pool: PoolConfig, device: torch.device) -> int:
    """Ranks on CPUs share the machine's memory; on GPUs the rank with the most KV heads sets the limit."""
    spec, length = spec_for_ranks(resolve_model(pool.path), pool.tensor_parallel, pool.max_model_len)
    block_size, dtype = block_size_of(pool, device), DTYPES[pool.dtype]
    shares = [bytes_per_block(part, block_size, dtype) for part in _parts(spec, pool.tensor_parallel)]
    block_bytes = sum(shares) if device.type == "cpu" else max(shares)
    return num_kv_blocks(pool, block_bytes, length, device)


def _parts(spec: ModelSpec, size: int) -> list[ModelSpec]:
    return [Shard.of(spec, rank, size).spec_of(spec) for rank in range(size)]
