"""A network of transformers as a Model: rows in, logits out, keys and values in the paged cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.messages.request import SamplingParams
from cluster.runtime.attention import block_multiple, make_attention
from cluster.runtime.generic.pager import IMPLEMENTATION, AttentionLayer, Pager, connect
from cluster.runtime.generic.probe import NUM_TOKENS, Recorder, check_equal, check_layers, in_pieces, probe_tokens
from cluster.runtime.generic.rows import RowOps, network_bytes
from cluster.runtime.input_batch import InputBatch
from cluster.runtime.kv_store import KVCache
from cluster.runtime.model_spec import KVHeads, ModelError

logger = logging.getLogger(__name__)

_TOLERANCE, _TOLERANCE_16_BIT = 1e-4, 0.05  # of the probe, relative: where activations are float32, and where not


@dataclass(frozen=True, slots=True)
class GenericSpec:
    """What a runner needs to know of a network."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    kv_heads: tuple[KVHeads, ...]  # of each layer


class GenericModel:
    """Owns a network; see Model. On the CPU activations are float32, matrices stay in the dtype they were loaded in."""

    output_token_ids = None

    def __init__(
        self,
        network: Any,
        dtype: torch.dtype,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """Probes the network. dtype: of its matrices, int8 quantises them. Raises ModelError if it cannot be served."""
        self.device = device
        self.max_model_len = max_model_len
        self._network = network
        self._kv_dtype = torch.float32 if dtype == torch.int8 else dtype  # of the probe's cache
        self._rows: RowOps | None = None
        layers = self._learn_layers()
        if device.type == "cpu":
            self._rows = RowOps(network, dtype)
        is_float32 = device.type == "cpu" or dtype == torch.float32
        self.weight_bytes = network_bytes(network)
        self._tolerance = _TOLERANCE if is_float32 else _TOLERANCE_16_BIT
        self._check_attention()
        self.spec = GenericSpec(network.config.vocab_size, eos_token_ids, tuple(layer.kv for layer in layers))
        self._pager = Pager(layers, make_attention(device))
        connect(network, self._pager)

    def forward(self, batch: InputBatch, kv: KVCache) -> Tensor:
        """See Model.forward."""
        self._pager.begin(batch, kv)
        return self._run(batch.token_ids, batch.positions, batch.sample_rows)

    def _run(self, token_ids: Tensor, positions: Tensor, sample_rows: Tensor) -> Tensor:
        if self._rows is None:
            return self._logits(token_ids, positions, sample_rows)
        with self._rows.step(len(token_ids)) as padding:
            # One more row for the head: what follows it (a soft cap) has last elements of its own.
            token_ids, positions = (F.pad(rows, (0, padding)) for rows in (token_ids, positions))
            return self._logits(token_ids, positions, F.pad(sample_rows, (0, 1)))[:-1]

    def _logits(self, token_ids: Tensor, positions: Tensor, sample_rows: Tensor) -> Tensor:
        output = self._network(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=sample_rows
        )
        logits: Tensor = output.logits[0]
        return logits.float()

    # --- the probe ---------------------------------------------------------------------------------------------------

    def _learn_layers(self) -> list[AttentionLayer]:
        layers, _ = self._record()
        config = self._network.config
        check_layers(layers, config.num_hidden_layers, config.to_dict().get("layer_types"))
        return layers

    def _check_attention(self) -> None:
        """Causal attention as the layers ask for it must give what the network's own attention gives."""
        _, recorded = self._record()
        self._network.set_attn_implementation("eager")
        own = self._run_probe()
        self._network.set_attn_implementation(IMPLEMENTATION)
        what = "its logits over causal attention are not its own: it attends in some way that was not foreseen"
        check_equal(recorded, own, self._tolerance, what)

    def _record(self) -> tuple[list[AttentionLayer], Tensor]:
        recorder = Recorder(NUM_TOKENS)
        connect(self._network, recorder)
        logits = self._run_probe()
        return recorder.layers, logits

    @torch.inference_mode()
    def _run_probe(self) -> Tensor:
        tokens = probe_tokens(self._network.config.vocab_size).to(self.device)
        positions = torch.arange(NUM_TOKENS, device=self.device)
        try:
            return self._run(tokens, positions, positions)
        except ModelError:
            raise
        except Exception as error:  # code that we do not know may raise anything
            raise ModelError(f"transformers' network of it does not run over paged attention: {error}") from error

    @torch.inference_mode()
    def check_memory(self) -> None:
        """Raise ModelError if a sequence in pieces differs from the whole: then the cache is not all its memory."""
        tokens, blocks = probe_tokens(self.spec.vocab_size).tolist(), tuple(range(4))
        block_size = max(4, block_multiple(self.device, self._kv_dtype))
        kv = KVCache.allocate(self.spec, len(blocks), block_size, self._kv_dtype, self.device)

        def run(piece: list[int], start: int) -> Tensor:
            sampling = SamplingParams(max_tokens=1, seed=0)
            item = ScheduledSequence("probe", tuple(piece), start, blocks, len(piece), sampling)
            return self.forward(InputBatch.build(SchedulerOutput((item,)), block_size, self.device), kv)

        whole, pieces = run(tokens, 0), in_pieces(run, tokens)
        check_equal(pieces, whole, self._tolerance, "it keeps state between tokens other than keys and values")
        if self._kv_dtype == torch.float32 and self.device.type == "cpu" and not torch.equal(pieces, whole):
            logger.warning("float32 results of this model depend on how its rows are batched")
