"""A model whose steps of few rows are replayed from graphs, which spares the host launching their operations."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cluster.config import PoolConfig
from cluster.runtime.attention import PLAIN, flash_computes
from cluster.runtime.graph_shapes import Eager, GraphShape, GraphShapes
from cluster.runtime.input_batch import CPU, HostRows, InputBatch
from cluster.runtime.kv_store import KVCache
from cluster.runtime.model import DecoderModel, Model
from cluster.runtime.static_batch import StaticBatches

logger = logging.getLogger(__name__)

Run = Callable[[], None]
Capture = Callable[[Run], Run]  # a function that has the device do something -> one that has it do that again

_MAX_GATHERED_BYTES = 2**28  # of keys or values at a time
_TOLERANCE = 0.05  # of the largest logit: what kernels may differ by; another step's logits differ by far more


def eager_reason(pool: PoolConfig, model: Model) -> str | None:
    """Why a pool's model cannot have graphs; None: it can."""
    if model.device.type != "cuda":
        return "only CUDA has graphs"
    if not pool.cuda_graphs:
        return "cuda_graphs is off"
    if pool.tensor_parallel > 1:
        return "a sum over ranks has no timeout inside a graph, so that a lost rank would hang the others for good"
    if not isinstance(model, DecoderModel):
        return "transformers' network may wait for the device in the middle of a step"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    batch: InputBatch  # what it reads
    replay: Run


def graphed(pool: PoolConfig, model: Model, kv: KVCache) -> GraphedModel:
    """A model with shapes for all that a pool's steps may be, none captured yet. `kv` has a padding block."""
    most = pool.max_num_seqs
    if not flash_computes(kv.keys[0].shape[3], kv.keys[0].dtype, PLAIN):  # then attention gathers the longest contexts
        width = -(-model.max_model_len // kv.block_size)
        most = min(most, _MAX_GATHERED_BYTES // (width * kv.keys[0][0].numel() * torch.float32.itemsize))
    shapes = GraphShapes.of(most, pool.max_num_batched_tokens, model.max_model_len, kv.block_size)
    return GraphedModel(model, kv, shapes)


class GraphedModel:
    """Owns the graphs of a model over one KV cache, and the memory that they read from and write to. See Model.

    A step that fits no shape runs eagerly. counts: steps by shape, or by why they ran eagerly.
    """

    device = CPU  # batches stay there until it is known how they are to run

    def __init__(self, model: Model, kv: KVCache, shapes: GraphShapes) -> None:
        self.spec = model.spec
        self.max_model_len = model.max_model_len
        self.output_token_ids = model.output_token_ids
        self.weight_bytes = model.weight_bytes
        self.counts: Counter[GraphShape | Eager] = Counter()
        self._model = model
        self._kv = kv
        self._shapes = shapes
        self._static = StaticBatches.allocate(shapes, kv, model.device)
        self._graphs: dict[GraphShape, _Graph] = {}
        self._logits = torch.empty(0)  # [most rows, output_size]

    def forward(self, batch: InputBatch, kv: KVCache) -> Tensor:
        """See Model.forward. What a graph gives is overwritten by the next one. `kv` is what the graphs are over."""
        chosen = self._choose(batch)
        self.counts[chosen] += 1
        if isinstance(chosen, Eager):
            return self._model.forward(InputBatch.place(batch.host, batch.sampling, self._model.device), kv)
        graph = self._graphs[chosen]
        self._static.load(batch.host, graph.batch)
        graph.replay()
        return self._logits[: batch.num_samples]

    def _choose(self, batch: InputBatch) -> GraphShape | Eager:
        if batch.num_samples == 0:
            return Eager.NO_SAMPLES
        num_seqs, table_width = batch.host.block_table.shape
        shape = self._shapes.fit(num_seqs, batch.num_tokens, batch.max_query_len, table_width)
        return shape if isinstance(shape, Eager) or shape in self._graphs else Eager.NOT_CAPTURED

    # --- capturing ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Capture every shape. One that fails, or does not repeat what it should, runs eagerly.

        Writes to the padding block only. Call it after the model has run once.
        """
        order, began = self._shapes.capture_order, time.monotonic()
        logger.info("capturing %d CUDA graphs", len(order))
        failures: list[RuntimeError] = []
        for shape in order:
            try:
                self._graphs[shape] = self._captured(shape, capture)
            except RuntimeError as error:
                failures.append(error)
        if failures:
            what = "%d of %d shapes have no CUDA graph, the first because: %s"
            logger.warning(what, len(failures), len(order), failures[0])
        logger.info("captured %d CUDA graphs in %.1f s", len(self._graphs), time.monotonic() - began)

    def _captured(self, shape: GraphShape, capture: Capture) -> _Graph:
        batch = self._static.batch(shape)

        def run() -> None:
            self._write(self._model.forward(batch, self._kv))

        self._static.load(self._probe(shape, 1), batch)
        run()  # libraries set themselves up, which they cannot do within a capture
        replay = capture(run)
        self._static.load(self._probe(shape, 2), batch)
        replay()
        replayed = self._logits[: shape.num_tokens].clone()
        run()
        _check_equal(replayed, self._logits[: shape.num_tokens])
        return _Graph(batch, replay)

    def _write(self, logits: Tensor) -> None:
        """Into memory outside of the graphs' own, which the next graph may use."""
        if self._logits.shape[1:] != logits.shape[1:]:  # the first and largest
            self._logits = torch.empty_like(logits)
        self._logits[: len(logits)].copy_(logits)

    def _probe(self, shape: GraphShape, seed: int) -> HostRows:
        """Rows over whatever the cache holds; all but the padding block is read only."""
        num_seqs, num_rows = shape.num_seqs, shape.num_tokens
        spare = self.max_model_len - shape.rows_per_seq + 1
        context_len = shape.rows_per_seq + (np.arange(num_seqs) * 37 + seed * 11) % spare
        table = np.arange(num_seqs * self._shapes.table_width) * seed % self._kv.num_blocks
        rows = HostRows.locate(
            (np.arange(num_rows) * 7 + seed) % self.spec.vocab_size,
            np.arange(num_rows),
            np.arange(0, num_rows + 1, shape.rows_per_seq, dtype=np.int32),
            context_len.astype(np.int32),
            table.reshape(num_seqs, -1).astype(np.int32),
            self._kv.block_size,
        )
        return replace(rows, slot_mapping=np.full(num_rows, self._kv.padding_block * self._kv.block_size))


def _check_equal(replayed: Tensor, expected: Tensor) -> None:
    """Raise RuntimeError unless they are about the same; NaN never is."""
    error, largest = float((replayed - expected).abs().max()), float(expected.abs().max())
    if not error <= _TOLERANCE * largest:
        raise RuntimeError(f"a graph's logits are {error:.3g} away from those of the same step, up to {largest:.3g}")
