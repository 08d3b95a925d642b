"""A CUDA device that computes nothing: tensors have shapes, types and a device, and no values.

Operations on tensors of two devices, and everything that would make the host wait for a value, raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from cluster.runtime.attention.cuda import CudaAttention
from cluster.runtime.checkpoint import load_spec
from cluster.runtime.decoder_layer import PlainLayerStack
from cluster.runtime.input_batch import CPU, HostRows, InputBatch
from cluster.runtime.kv_store import KVCache
from cluster.runtime.layers import TorchLayerOps
from cluster.runtime.model import DecoderModel
from cluster.runtime.model_spec import ModelSpec
from cluster.runtime.sampling_batch import SamplingBatch
from cluster.runtime.weights import DecoderWeights, load_weights

CUDA = torch.device("cuda", 0)


_OPERATORS = {Tensor.copy_: torch.ops.aten.copy_, Tensor.__invert__: torch.ops.aten.bitwise_not}


class _Operators(TorchFunctionMode):
    """Does by operators what otherwise looks for a real device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            return _index(*args)
        if func is Tensor.__setitem__:
            tensor, key, value = args
            _check_index(tensor, key)
            return torch.ops.aten.index_put_(tensor, [key], value)
        return _OPERATORS.get(func, func)(*args, **(kwargs or {}))


def _index(tensor: Tensor, key: Any) -> Tensor:
    indices: list[Tensor | None] = []
    for part in key if isinstance(key, tuple) else (key,):
        if part is None:
            tensor = torch.ops.aten.unsqueeze(tensor, len(indices))
            indices.append(None)
        elif isinstance(part, slice):
            stop = 2**62 if part.stop is None else part.stop
            tensor = torch.ops.aten.slice.Tensor(tensor, len(indices), part.start, stop)
            indices.append(None)
        elif isinstance(part, int):
            tensor = torch.ops.aten.select.int(tensor, len(indices), part)
        else:
            _check_index(tensor, part)
            indices.append(part)
    return torch.ops.aten.index.Tensor(tensor, indices) if any(i is not None for i in indices) else tensor


def _check_index(tensor: Tensor, index: Tensor) -> None:
    assert index.device == tensor.device, f"an index on {index.device} into a tensor on {tensor.device}"


@contextmanager
def fake_cuda() -> Iterator[None]:
    with FakeTensorMode(), _Operators():
        yield


def on_fake_cuda(value: Any) -> Any:
    """A tensor, or all tensors in dataclasses and tuples, as they would be on the device."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=CUDA)
    if isinstance(value, tuple):
        return tuple(on_fake_cuda(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: on_fake_cuda(getattr(value, field.name)) for field in fields(value)})
    return value


def fake_batch(host: HostRows, sampling: SamplingBatch) -> InputBatch:
    """A batch whose tensors are on the device. What there is of it on the host stays."""
    return cast(InputBatch, on_fake_cuda(InputBatch.place(host, sampling)))


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A decoder of the Llama family, read and not yet on the device."""

    spec: ModelSpec
    weights: DecoderWeights
    dtype: torch.dtype

    @classmethod
    def read(cls, path: Path, dtype: torch.dtype) -> Checkpoint:
        spec = load_spec(path)
        return cls(spec, load_weights(path, spec, dtype, CPU), dtype)

    def load(self, num_blocks: int, block_size: int, batch_invariant: bool = False) -> tuple[DecoderModel, KVCache]:
        """As CUDA runs it; within fake_cuda()."""
        weights, ops = on_fake_cuda(self.weights), TorchLayerOps(batch_invariant)
        layers = PlainLayerStack(self.spec, weights.layers, ops, CudaAttention())
        model = DecoderModel(self.spec, weights, ops, layers, self.spec.max_position)
        return model, KVCache.allocate(self.spec, num_blocks, block_size, self.dtype, CUDA)


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    **options: Any,
) -> Tensor:
    """What FlashAttention 2 as torch brings it checks before it reads a block table, in order."""
    lengths, table = options["seqused_k"], options["block_table"]
    assert cu_seq_k is not None, "both or neither of the cumulative lengths"
    assert {query.dtype, key.dtype, value.dtype} in ({torch.bfloat16}, {torch.float16})
    for tensor in (cu_seq_q, cu_seq_k, lengths, table):
        assert tensor.dtype == torch.int32
        assert tensor.device == query.device == key.device == value.device
        assert tensor.is_contiguous()
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    num_seqs, num_heads, head_dim = len(cu_seq_q) - 1, *query.shape[1:]
    assert num_seqs > 0
    assert head_dim <= 256
    assert head_dim % 8 == 0
    assert num_heads % key.shape[2] == 0
    assert key.shape == value.shape == (key.shape[0], key.shape[1], key.shape[2], head_dim)
    assert key.shape[1] % 256 == 0, "pages of 256"
    assert table.shape[0] == num_seqs
    assert cu_seq_k.shape == cu_seq_q.shape
    assert lengths.shape == (num_seqs,)
    assert max_q > 0
    assert 0 < max_k <= table.shape[1] * key.shape[1]
    assert options["enable_gqa"] == (num_heads != key.shape[2])
    assert options["num_splits"] == 1, "splits over a block table are wrong"
    return torch.empty_like(query)
