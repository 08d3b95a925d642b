"""The ranks of a replica as processes: what each is told at its start, and what those that follow do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from cluster.config import Device, PoolConfig
from cluster.core.step import SchedulerOutput
from cluster.runtime.input_batch import InputBatch
from cluster.runtime.kv_store import KVCache
from cluster.runtime.model_runner import DTYPES, ModelRunner, block_size_of, torch_device, weight_dtype
from cluster.runtime.model_spec import ModelError
from cluster.runtime.model_store import resolve_model
from cluster.runtime.sampler import make_sampler
from cluster.runtime.sampling_batch import SamplingBatch
from cluster.runtime.sharded_model import ShardedModel, load_shard
from cluster.runtime.step_frame import FRAME_WORDS, FrameHeader, FrameKind, decode_step
from cluster.runtime.tensor_parallel import COLLECTIVE_TIMEOUT_S, TPGroup
from cluster.runtime.threads import default_num_threads, set_num_threads

LOAD_TIMEOUT_S = 600.0  # from a rank's start until all have their weights and kernels
_GO = "go"


@dataclass(frozen=True, slots=True)
class RankJob:
    """Everything that a rank is told once; `rendezvous` is a file that all ranks of the machine can open."""

    pool: PoolConfig
    device: Device
    target_path: str | None
    num_blocks: int
    rank: int
    rendezvous: str
    timeout_s: float = COLLECTIVE_TIMEOUT_S

    @property
    def size(self) -> int:
        return self.pool.tensor_parallel

    def store(self) -> Store:
        store = FileStore(self.rendezvous, self.size)
        store.set_timeout(timedelta(seconds=LOAD_TIMEOUT_S))
        return store


class Ranks(Protocol):
    """The running ranks that rank 0 started. Any thread may call."""

    def failure(self) -> str | None:
        """Why one of them does not run any more; None: all run."""

    def wait(self, timeout_s: float) -> None:
        """Return when all have ended by themselves, or the time is over."""

    def kill(self) -> None:
        """End them all, also those that hang. Idempotent."""


Launcher = Callable[[list[RankJob]], Ranks]


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank with its weights, its KV memory and its kernels, not yet joined with the others."""

    group: TPGroup
    model: ShardedModel
    kv: KVCache


def load_rank(job: RankJob) -> Rank:
    """Load a rank's part of the model and warm up, without a word to the others. Raises ModelError."""
    pool, device = job.pool, rank_device(job.device, job.rank, job.size)
    if device.type == "cpu":
        set_num_threads(pool.num_threads or max(1, default_num_threads() // job.size))
    dtype, group = DTYPES[pool.dtype], TPGroup(job.rank, job.size, device)
    target = None if job.target_path is None else resolve_model(job.target_path)
    path, stored = resolve_model(pool.path), weight_dtype(pool, device)
    model = load_shard(path, stored, device, group, target, pool.max_model_len, pool.batch_invariant)
    kv = KVCache.allocate(model.spec, job.num_blocks, block_size_of(pool, device), dtype, device)
    ModelRunner(model, kv, make_sampler(device)).warm_up(pool.max_num_batched_tokens)
    return Rank(group, model, kv)


def rank_device(device: Device, rank: int, size: int) -> torch.device:
    """A rank's device: the only GPU that its process sees, or one of its own among several."""
    where = torch_device(device)
    if where.type == "cpu":
        return where
    count = torch.cuda.device_count()
    if 1 < count < size:
        raise ModelError(f"tensor_parallel: {size} ranks need a GPU each, this process sees {count}")
    where = torch.device("cuda", 0 if count == 1 else rank)
    torch.cuda.set_device(where)
    return where


def ready_key(rank: int) -> str:
    """What a rank writes into the store once it is loaded: the bytes of its weights."""
    return f"ready/{rank}"


def release(store: Store) -> None:
    """Rank 0 lets the others join."""
    store.set(_GO, "")


def run_rank(job: RankJob) -> None:
    """The life of a rank other than 0: load, join, follow; returns when rank 0 says so.

    Raises RuntimeError when the group breaks; the process must then end, which the others notice.
    """
    store = job.store()
    rank = load_rank(job)
    store.set(ready_key(job.rank), str(rank.model.weight_bytes))
    store.wait([_GO])
    rank.group.join(store, job.timeout_s)
    follow(rank)


@torch.inference_mode()
def follow(rank: Rank) -> None:
    """Do what rank 0 says until it says stop. Raises RuntimeError when it falls silent or skips a frame."""
    unsampled = SamplingBatch.build(SchedulerOutput())
    number = 0
    while True:
        words = np.empty(FRAME_WORDS, dtype=np.int32)
        rank.group.hear(words)
        header = FrameHeader.parse(words)
        if header.number != number:
            raise RuntimeError(f"expected frame {number} of rank 0, got {header.number}")
        number += 1
        match header.kind:
            case FrameKind.STOP:
                return
            case FrameKind.PING:
                rank.group.answer()
            case FrameKind.STEP:
                if header.length > FRAME_WORDS:
                    rest = np.empty(header.length - FRAME_WORDS, dtype=np.int32)
                    rank.group.hear(rest)
                    words = np.concatenate([words, rest])
                rows = decode_step(header, words, rank.kv.block_size)
                rank.model.forward(InputBatch.place(rows, unsampled, rank.model.device), rank.kv)


def rendezvous_file(folder: str) -> str:
    """Where the ranks of one group meet; `folder` is theirs alone."""
    return str(Path(folder) / "ranks")
