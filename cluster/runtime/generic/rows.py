"""Products and element-wise functions of a network whose result for a row does not depend on the other rows.

Three things of torch do, on a CPU:

    products      F.linear sums in an order that follows the number of rows: our own kernel computes them
    functions     exp, tanh, cos and their like are computed by another code for the last elements of a tensor that do
                  not fill a register: rows are padded to a multiple of ROW_MULTIPLE, so that there are none
    threads       a tensor is cut among threads anywhere, which makes such last elements: one thread computes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from cluster.runtime.cpu_kernels import PackedLinear, default_torch_above_rows, linear
from cluster.runtime.model_spec import ModelError
from cluster.runtime.quantization import store

ROW_MULTIPLE = 32  # elements that torch's widest loop takes at once: two registers of sixteen float32


class RowCount:
    """Owns the number of rows of the step under way, padding apart."""

    def __init__(self, multiple: int) -> None:
        self._multiple = multiple
        self._num_rows = 0

    def begin(self, num_rows: int) -> int:
        """Start a step; returns how many rows of padding it gets."""
        self._num_rows = num_rows
        return -num_rows % self._multiple

    def of(self, rows: Tensor) -> int:
        """Rows worth computing of [1, rows, features]; all of them for any other shape."""
        padded = self._num_rows + -self._num_rows % self._multiple
        if rows.dim() == 3 and rows.shape[:2] == (1, padded):
            return self._num_rows
        return rows.numel() // rows.shape[-1]


class RowLinear(nn.Module):
    """x W^T + bias with float32 x; rows of padding come out as zeros."""

    def __init__(self, packed: PackedLinear, count: RowCount) -> None:
        super().__init__()
        self._packed = packed
        self._count = count

    @property
    def tensors(self) -> list[Tensor]:
        """What it holds."""
        return self._packed.tensors

    def forward(self, rows: Tensor) -> Tensor:
        """rows float32 [..., in_features] -> [..., out_features]."""
        flat, count = rows.reshape(-1, rows.shape[-1]), self._count.of(rows)
        product = linear(flat[:count].contiguous(), self._packed)
        return F.pad(product, (0, 0, 0, len(flat) - count)).view(*rows.shape[:-1], product.shape[-1])


class _LooseProducts(TorchFunctionMode):
    """Replaces F.linear while it is entered: the products with matrices that are no module of their own."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operation."""
        if func is F.linear:
            return _loose_linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _loose_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    flat = rows.reshape(-1, rows.shape[-1]).float().contiguous()
    product = linear(flat, PackedLinear.pack(weight.detach(), bias, default_torch_above_rows()))
    return product.view(*rows.shape[:-1], len(weight))


class RowOps:
    """Owns a network's products, once replaced, and how a step is run on them."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        """dtype: of the matrices. Raises ModelError if they are to be int8 and are not all modules of their own."""
        self._exact = dtype != torch.bfloat16
        self._count = RowCount(ROW_MULTIPLE if self._exact else 1)
        _replace_products(network, dtype, self._count)
        _widen(network)
        self._has_loose_products = any(parameter.dim() > 1 for parameter in _own_parameters(network))
        if self._has_loose_products and dtype == torch.int8:
            raise ModelError("quantization: int8 is not supported for the matrices of its experts")

    @contextmanager
    def step(self, num_rows: int) -> Iterator[int]:
        """Run a network on num_rows rows and as many of padding as this gives."""
        with _one_thread(self._exact), _LooseProducts() if self._has_loose_products else _nothing():
            yield self._count.begin(num_rows)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _one_thread(wanted: bool) -> Iterator[None]:
    """torch's own operations on one thread; the kernel team is another pool."""
    before = torch.get_num_threads()
    if not wanted or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _replace_products(network: nn.Module, dtype: torch.dtype, count: RowCount) -> None:
    for parent in list(network.modules()):
        for name, module in list(parent.named_children()):
            if type(module) in (nn.Linear, Conv1D):
                setattr(parent, name, RowLinear(_pack(module, dtype), count))


def _pack(module: nn.Module, dtype: torch.dtype) -> PackedLinear:
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    matrix = weight.detach().t() if isinstance(module, Conv1D) else weight.detach()  # Conv1D holds [in, out]
    stored = store(matrix, dtype, None if bias is None else bias.detach())
    return PackedLinear.pack(stored.weight, stored.bias, default_torch_above_rows(), stored.scales)


def _own_parameters(network: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters outside of embeddings."""
    for module in network.modules():
        if not isinstance(module, nn.Embedding):
            yield from module.parameters(recurse=False)


def _widen(network: nn.Module) -> None:
    """Activations and vectors of weights in float32; embeddings and other matrices stay as they are stored."""
    for parameter in _own_parameters(network):
        if parameter.dim() < 2:
            parameter.data = parameter.data.float()
    for module in network.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda module, inputs, rows: rows.float())


def network_bytes(network: nn.Module) -> int:
    """Bytes of memory of a network's weights; a tensor that is used twice counts once."""
    products = [module.tensors for module in network.modules() if isinstance(module, RowLinear)]
    tensors = [*network.parameters(), *(tensor for held in products for tensor in held)]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
