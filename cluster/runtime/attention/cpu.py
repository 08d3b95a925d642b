"""Paged attention on the CPU: float32 queries over stored keys and values, read where they lie."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cluster.runtime.attention import PLAIN, AttentionOptions
from cluster.runtime.cpu_kernels import FORMATS
from cluster.runtime.input_batch import InputBatch
from cluster.runtime.kernels.attention_tile import ATTENTION
from cluster.runtime.kernels.compiling import Records
from cluster.runtime.kernels.formats import Format
from cluster.runtime.kernels.kv_write import KV_WRITE, kv_write_function, launch_kv_write
from cluster.runtime.kernels.paged_attention import attention_functions, launch_attention
from cluster.runtime.threads import kernel_team

_CACHE_FORMATS = (Format.FLOAT32, Format.BFLOAT16, Format.FLOAT16)


class CpuAttention:
    """Attention whose result for a row depends on that row's query and context only, to the bit.

    Queries, keys and values may be views of one packed tensor: only a token's own heads must lie side by side.
    """

    def write_kv(
        self, keys: Tensor, values: Tensor, layer_keys: Tensor, layer_values: Tensor, batch: InputBatch
    ) -> None:
        """See AttentionBackend.write_kv. Raises ValueError for a layout or dtype that the kernel does not read."""
        _check_rows(keys, values)
        _check_layer(layer_keys, layer_values)
        team = kernel_team()
        record = _record(
            KV_WRITE,
            (keys.data_ptr(), values.data_ptr(), layer_keys.data_ptr(), layer_values.data_ptr()),
            (batch.host.slot_mapping.ctypes.data, 4 * keys.stride(0), 4 * values.stride(0)),
            (len(keys), keys.shape[1] * keys.shape[2], FORMATS[layer_keys.dtype].value, kv_write_function()),
        )
        launch_kv_write(team.address, record)

    def attend(
        self,
        query: Tensor,
        layer_keys: Tensor,
        layer_values: Tensor,
        batch: InputBatch,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """See AttentionBackend.attend. Raises ValueError for a layout or dtype that the kernel does not read."""
        _check_rows(query)
        _check_layer(layer_keys, layer_values)
        team, host = kernel_team(), batch.host
        _, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, _ = layer_keys.shape
        output, stored = torch.empty(query.shape), FORMATS[layer_keys.dtype]
        record = _record(
            ATTENTION,
            (query.data_ptr(), layer_keys.data_ptr(), layer_values.data_ptr(), output.data_ptr()),
            (host.block_table.ctypes.data, host.query_start.ctypes.data, host.context_len.ctypes.data),
            (4 * query.stride(0), layer_keys.stride(1) * stored.num_bytes, host.block_table.strides[0]),
            (len(host.context_len), num_heads, num_kv_heads, head_dim, block_size, stored.value, options.window or 0),
            (*attention_functions(), team.num_threads, 0, 0, 0, 0, 0, 0),
            _bits(options.scale_for(head_dim), options.softcap or 0.0),
        )
        launch_attention(team.address, record)
        return output


def _record(dtype: np.dtype[np.void], *fields: tuple[int, ...]) -> Records:
    return np.array([value for group in fields for value in group], dtype=np.int64).view(dtype)


def _bits(*values: float) -> tuple[int, ...]:
    """float64 numbers as a record holds them."""
    return tuple(np.array(values, dtype=np.float64).view(np.int64).tolist())


def _check_rows(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.float32 or tensor.stride(2) != 1 or tensor.stride(1) != tensor.shape[2]:
            raise ValueError(f"expected float32 rows of adjacent heads, got {tensor.dtype} {tensor.stride()}")


def _check_layer(*tensors: Tensor) -> None:
    for tensor in tensors:
        if FORMATS.get(tensor.dtype) not in _CACHE_FORMATS or not tensor.is_contiguous():
            raise ValueError(f"expected a contiguous cache of floats, got {tensor.dtype} {tensor.stride()}")
