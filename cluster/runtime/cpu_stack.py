"""Decoder layers on the CPU in one kernel call per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.runtime.attention.cpu import CpuAttention
from cluster.runtime.cpu_kernels import FORMATS, PackedLinear
from cluster.runtime.cpu_layers import CpuLayerOps
from cluster.runtime.decoder_layer import PlainLayerStack
from cluster.runtime.input_batch import InputBatch
from cluster.runtime.kernels.decoder import LAYER, STEP, run_layers
from cluster.runtime.kernels.elementwise import gated_silu_function, rms_norm_function
from cluster.runtime.kernels.kv_write import kv_write_function
from cluster.runtime.kernels.linear import linear_function
from cluster.runtime.kernels.paged_attention import attention_functions
from cluster.runtime.kernels.rotary import rotary_function
from cluster.runtime.kernels.team import KernelTeam
from cluster.runtime.kv_store import KVCache
from cluster.runtime.layers import LinearWeights
from cluster.runtime.model_spec import ModelSpec
from cluster.runtime.threads import kernel_team
from cluster.runtime.weights import LayerWeights


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
        return tuple(0 if tensor is None else tensor.data_ptr() for tensor in self.tensors)


def _float(tensor: Tensor) -> Tensor:
    return tensor.float().contiguous()


def _matrix(weights: LinearWeights) -> tuple[Tensor, Tensor | None, Tensor | None]:
    packed = PackedLinear.pack(weights.weight, weights.bias, None, weights.scales)
    return packed.weight, packed.scales, packed.bias


class CpuLayerStack:
    """Layers computed by one call per step, which saves the time between operations when rows are few.

    Steps of many rows on bfloat16 weights go operation by operation where torch's product is the faster one.
    Both ways give the same bits wherever both use our kernels.
    """

    def __init__(self, spec: ModelSpec, layers: Sequence[LayerWeights], ops: CpuLayerOps) -> None:
        dtype = layers[0].qkv.weight.dtype
        self._spec = spec
        self._weights_stored = FORMATS[dtype].value
        self._max_rows = ops.torch_above_rows if dtype == torch.bfloat16 else None
        self._plain = PlainLayerStack(spec, layers, ops, CpuAttention())
        self._layers = tuple(_LayerTensors.of(layer) for layer in layers)
        self._scratch_widths = _scratch_widths(spec)
        self._records: tuple[KVCache, NDArray[np.void]] | None = None  # of the KV cache last seen

    def forward(self, hidden: Tensor, rotary: Tensor, batch: InputBatch, kv: KVCache) -> Tensor:
        """See LayerStack.forward; hidden float32, contiguous; it is overwritten."""
        if self._max_rows is not None and len(hidden) > self._max_rows:
            return self._plain.forward(hidden, rotary, batch, kv)
        team = kernel_team()
        scratch = torch.empty(len(hidden) * sum(self._scratch_widths))
        step = self._step(hidden, rotary, batch, kv, scratch, team)
        run_layers(team.address, self._layer_records(kv), step)
        return hidden

    def _layer_records(self, kv: KVCache) -> NDArray[np.void]:
        if self._records is None or self._records[0] is not kv:
            rows = [
                (*layer.addresses, keys.data_ptr(), values.data_ptr())
                for layer, (keys, values) in zip(self._layers, kv.layers, strict=True)
            ]
            self._records = kv, np.array(rows, dtype=LAYER)
        return self._records[1]

    def _step(
        self, hidden: Tensor, rotary: Tensor, batch: InputBatch, kv: KVCache, scratch: Tensor, team: KernelTeam
    ) -> NDArray[np.void]:
        spec, host = self._spec, batch.host
        starts = accumulate(self._scratch_widths[:-1], initial=0)
        fields = (
            hidden.data_ptr(),
            *(rotary.data_ptr(), host.slot_mapping.ctypes.data, host.block_table.ctypes.data),
            *(host.query_start.ctypes.data, host.context_len.ctypes.data),
            *(len(hidden), len(host.context_len), host.block_table.strides[0]),
            *(spec.hidden_size, spec.intermediate_size, spec.num_heads, spec.num_kv_heads, spec.head_dim),
            *(self._weights_stored, FORMATS[kv.keys[0].dtype].value, kv.block_size),
            *(scratch.data_ptr() + 4 * len(hidden) * start for start in starts),
            *(linear_function(), rms_norm_function(), gated_silu_function(), rotary_function(), kv_write_function()),
            *(*attention_functions(), team.num_threads),
            spec.norm_eps,
        )
        return np.array([fields], dtype=STEP)


def _scratch_widths(spec: ModelSpec) -> tuple[int, ...]:
    """Features per token of normed, packed, attended, middle, gate_up and activated, in the STEP record's order."""
    heads = spec.num_heads * spec.head_dim
    packed = heads + 2 * spec.num_kv_heads * spec.head_dim
    return spec.hidden_size, packed, heads, spec.hidden_size, 2 * spec.intermediate_size, spec.intermediate_size
