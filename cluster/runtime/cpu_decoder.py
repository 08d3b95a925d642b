"""The decoder on the CPU: one kernel call per step, from token ids to logits."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.runtime.attention.cpu import CpuAttention
from cluster.runtime.cpu_kernels import FORMATS, PackedLinear, optional_address
from cluster.runtime.cpu_layers import CpuLayerOps
from cluster.runtime.decoder_layer import PlainLayerStack
from cluster.runtime.input_batch import InputBatch
from cluster.runtime.kernels.decoder import LAYER, STEP, run_decoder
from cluster.runtime.kernels.elementwise import gated_silu_function, rms_norm_function
from cluster.runtime.kernels.kv_write import kv_write_function
from cluster.runtime.kernels.linear import linear_function
from cluster.runtime.kernels.paged_attention import attention_functions
from cluster.runtime.kernels.rotary import rotary_function
from cluster.runtime.kernels.team import KernelTeam
from cluster.runtime.kv_store import KVCache
from cluster.runtime.layers import LinearWeights
from cluster.runtime.model import DecoderModel
from cluster.runtime.model_spec import ModelSpec
from cluster.runtime.threads import kernel_team
from cluster.runtime.weights import DecoderWeights, LayerWeights


@dataclass(frozen=True, slots=True, eq=False)
class _LayerTensors:
    """What a LAYER record points to, kept alive; in the record's order."""

    tensors: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, layer: LayerWeights) -> _LayerTensors:
        return cls(
            (
                _float(layer.input_norm),
                *_matrix(layer.qkv),
                None if layer.qk_norm is None else _float(layer.qk_norm),
                *_matrix(layer.output),
                _float(layer.mlp_norm),
                *_matrix(layer.gate_up),
                *_matrix(layer.down),
            )
        )

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(map(optional_address, self.tensors))


def _float(tensor: Tensor) -> Tensor:
    return tensor.float().contiguous()


def _packed(weights: LinearWeights) -> PackedLinear:
    return PackedLinear.pack(weights.weight, weights.bias, None, weights.scales)


def _matrix(weights: LinearWeights) -> tuple[Tensor, Tensor | None, Tensor | None]:
    packed = _packed(weights)
    return packed.weight, packed.scales, packed.bias


class CpuDecoder(DecoderModel):
    """A decoder whose step is one call without the GIL, which saves the time between operations when rows are few.

    Steps of many rows on bfloat16 weights go operation by operation where torch's product is the faster one.
    Both ways give the same bits wherever both use our kernels.
    """

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, ops: CpuLayerOps, max_model_len: int) -> None:
        super().__init__(spec, weights, ops, PlainLayerStack(spec, weights.layers, ops, CpuAttention()), max_model_len)
        dtype = weights.layers[0].qkv.weight.dtype
        self._max_rows = ops.torch_above_rows if dtype == torch.bfloat16 else None
        self._layer_tensors = tuple(_LayerTensors.of(layer) for layer in weights.layers)
        self._ends = _packed(weights.embedding), _packed(weights.head)
        self._output_size = len(weights.head.weight)
        self._step = self._template(dtype)
        widths = _scratch_widths(spec)
        self._scratch_width = sum(widths.values())
        self._scratch_starts = dict(zip(widths, accumulate(widths.values(), initial=0), strict=False))
        self._records: tuple[KVCache, NDArray[np.void]] | None = None  # of the KV cache last seen

    def forward(self, batch: InputBatch, kv: KVCache) -> Tensor:
        """See Model.forward."""
        if self._max_rows is not None and batch.num_tokens > self._max_rows:
            return super().forward(batch, kv)
        team = kernel_team()
        logits = torch.empty((batch.num_samples, self._output_size))
        scratch = torch.empty(batch.num_tokens * self._scratch_width)
        self._fill(batch, kv, scratch, logits, team)
        run_decoder(team.address, self._layer_records(kv), self._step)
        return logits

    def _layer_records(self, kv: KVCache) -> NDArray[np.void]:
        if self._records is None or self._records[0] is not kv:
            rows = [
                (*layer.addresses, keys.data_ptr(), values.data_ptr())
                for layer, (keys, values) in zip(self._layer_tensors, kv.layers, strict=True)
            ]
            self._records = kv, np.array(rows, dtype=LAYER)
        return self._records[1]

    def _template(self, dtype: torch.dtype) -> NDArray[np.void]:
        """A STEP record with what is the same in every step."""
        step, spec = np.zeros(1, dtype=STEP), self.spec
        embedding, head = self._ends
        step["embedding"], step["embedding_scales"] = embedding.weight.data_ptr(), optional_address(embedding.scales)
        step["embedding_stored"] = FORMATS[embedding.weight.dtype].value
        step["rotary_table"], step["final_norm"] = self._rotary.data_ptr(), self._norm.data_ptr()
        step["head"], step["head_scales"] = head.weight.data_ptr(), optional_address(head.scales)
        step["head_bias"], step["head_stored"] = optional_address(head.bias), FORMATS[head.weight.dtype].value
        step["output_size"] = self._output_size
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            step[name] = getattr(spec, name)
        step["eps"], step["weights_stored"] = spec.norm_eps, FORMATS[dtype].value
        functions = (
            *(linear_function(), rms_norm_function(), gated_silu_function(), rotary_function(), kv_write_function()),
            *attention_functions(),
        )
        names = ("linear", "norm", "silu", "rotary", "kv_write", "tile", "span", "merge")
        for name, function in zip(names, functions, strict=True):
            step[f"{name}_function"] = function
        return step

    def _fill(self, batch: InputBatch, kv: KVCache, scratch: Tensor, logits: Tensor, team: KernelTeam) -> None:
        """Put one step into the record."""
        step, host, num_tokens = self._step, batch.host, batch.num_tokens
        step["token_ids"], step["positions"] = host.token_ids.ctypes.data, host.positions.ctypes.data
        step["sample_rows"], step["slots"] = host.sample_rows.ctypes.data, host.slot_mapping.ctypes.data
        step["block_table"], step["query_start"] = host.block_table.ctypes.data, host.query_start.ctypes.data
        step["context_len"], step["table_stride"] = host.context_len.ctypes.data, host.block_table.strides[0]
        step["num_tokens"], step["num_samples"] = num_tokens, batch.num_samples
        step["num_seqs"], step["num_threads"] = len(host.context_len), team.num_threads
        step["kv_stored"], step["block_size"] = FORMATS[kv.keys[0].dtype].value, kv.block_size
        for name, start in self._scratch_starts.items():
            step[name] = scratch.data_ptr() + 4 * num_tokens * start
        step["logits"] = logits.data_ptr()


def _scratch_widths(spec: ModelSpec) -> dict[str, int]:
    """Floats per token of what a step needs beside its results, by the STEP record's names."""
    heads = spec.num_heads * spec.head_dim
    return {
        "hidden": spec.hidden_size,
        "table_rows": spec.head_dim,
        "normed": spec.hidden_size,
        "packed": heads + 2 * spec.num_kv_heads * spec.head_dim,
        "attended": heads,
        "middle": spec.hidden_size,
        "gate_up": 2 * spec.intermediate_size,
        "activated": spec.intermediate_size,
    }
