"""The CPU kernels as functions on torch tensors: checks, addresses, nothing else. Tensors are never copied."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from llvmlite.binding import get_host_cpu_features
from torch import Tensor

from cluster.runtime.kernels.elementwise import (
    gated_silu_function,
    launch_gated_silu,
    launch_rms_norm,
    rms_norm_function,
)
from cluster.runtime.kernels.formats import Format
from cluster.runtime.kernels.linear import launch_linear, linear_function
from cluster.runtime.threads import kernel_team

FORMATS = {
    torch.float32: Format.FLOAT32,
    torch.bfloat16: Format.BFLOAT16,
    torch.float16: Format.FLOAT16,
    torch.int8: Format.INT8,
}


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight matrix as the linear kernel reads it: the checkpoint's own tensor, checked once.

    torch_above_rows: with more rows than this, torch's bfloat16 product takes over; None: never.
    """

    weight: Tensor  # of any dtype in FORMATS, [out_features, in_features], contiguous
    scales: Tensor | None  # float32 [out_features], of int8 weights only
    bias: Tensor | None  # float32 [out_features]
    torch_above_rows: int | None

    @classmethod
    def pack(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        torch_above_rows: int | None = None,
        scales: Tensor | None = None,
    ) -> PackedLinear:
        """Raises ValueError for other dtypes and layouts.

        Only bfloat16 weights ever leave the kernel, whose results do not depend on the number of rows.
        """
        if weight.dtype not in FORMATS or weight.dim() != 2 or weight.device.type != "cpu":
            raise ValueError(f"weights must be a float or int8 matrix on the CPU, got {weight.dtype} {weight.shape}")
        if (scales is not None) != (weight.dtype == torch.int8):
            raise ValueError("int8 weights need scales, and other weights have none")
        limit = torch_above_rows if weight.dtype == torch.bfloat16 else None
        return cls(weight.contiguous(), _vector(scales, weight), _vector(bias, weight), limit)

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that it holds."""
        return [tensor for tensor in (self.weight, self.scales, self.bias) if tensor is not None]

    def __call__(self, x: Tensor) -> Tensor:
        """See linear."""
        return linear(x, self)


def _vector(values: Tensor | None, weight: Tensor) -> Tensor | None:
    """A bias or scales for the kernel."""
    if values is not None and values.shape != weight.shape[:1]:
        raise ValueError(f"{tuple(values.shape)} numbers do not fit weights of shape {tuple(weight.shape)}")
    return None if values is None else values.float().contiguous()


def linear(x: Tensor, packed: PackedLinear, residual: Tensor | None = None) -> Tensor:
    """(x W^T) * scales + bias + residual, float32 [num_rows, out_features], summed in float32.

    x: float32 [num_rows, in_features] with adjacent features; residual: float32, contiguous, of the result's shape.
    Without torch_above_rows a row's result does not depend on the other rows or their number, to the bit.
    Raises ValueError if a shape, dtype or layout does not fit.
    """
    weight = packed.weight
    num_columns, depth = weight.shape
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != depth or x.stride(1) != 1:
        raise ValueError(f"expected float32 [rows, {depth}] with adjacent features, got {x.dtype} {tuple(x.shape)}")
    if packed.torch_above_rows is not None and len(x) > packed.torch_above_rows:
        return _torch_linear(x, packed, residual)
    out = torch.empty((len(x), num_columns))
    if residual is not None and (residual.shape != out.shape or not _is_plain(residual)):
        raise ValueError(f"expected a contiguous float32 residual {tuple(out.shape)}, got {tuple(residual.shape)}")
    launch_linear(
        kernel_team().address,
        linear_function(),
        x.data_ptr(),
        weight.data_ptr(),
        optional_address(packed.scales),
        optional_address(packed.bias),
        optional_address(residual),
        out.data_ptr(),
        len(x),
        num_columns,
        depth,
        4 * x.stride(0),
        FORMATS[weight.dtype].value,
    )
    return out


def optional_address(tensor: Tensor | None) -> int:
    """As kernels take it: 0 stands for none."""
    return 0 if tensor is None else tensor.data_ptr()


def _torch_linear(x: Tensor, packed: PackedLinear, residual: Tensor | None) -> Tensor:
    out = F.linear(x.to(packed.weight.dtype), packed.weight).float()
    for addend in (packed.bias, residual):
        if addend is not None:
            out += addend
    return out


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension; float32, contiguous; each row on its own.

    weight has x's features, or [heads, features] for x [num_rows, heads, features]. Raises ValueError otherwise.
    """
    features = x.shape[-1]
    if not (_is_plain(x) and _is_plain(weight)) or x.shape[x.dim() - weight.dim() :] != weight.shape:
        raise ValueError(f"expected float32 rows of {tuple(weight.shape)}, got {x.dtype} {tuple(x.shape)}")
    out, team = torch.empty_like(x), kernel_team()
    sizes = (x.numel() // features, weight.numel() // features, features)
    addresses = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
    launch_rms_norm(team.address, rms_norm_function(), *addresses, *sizes, eps)
    return out


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of rows that hold gate and up side by side: float32 [rows, 2 * n] -> [rows, n]."""
    if not _is_plain(gate_up) or gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"expected contiguous float32 [rows, 2 * n], got {gate_up.dtype} {tuple(gate_up.shape)}")
    num_rows, features = len(gate_up), gate_up.shape[1] // 2
    out, team = torch.empty((num_rows, features)), kernel_team()
    launch_gated_silu(team.address, gated_silu_function(), gate_up.data_ptr(), out.data_ptr(), num_rows, features)
    return out


# --- where torch's bfloat16 product becomes the faster one -----------------------------------------------------------

_TORCH_ABOVE_ROWS = 16
_MATRIX_FEATURES = ("amx-bf16", "bf16")  # as LLVM names them: Intel's tiles, Arm's dot products


@cache
def default_torch_above_rows() -> int | None:
    """The number of rows above which torch's bfloat16 product is the faster one here; None: never.

    It is where the processor has units for matrices of bfloat16, which the kernel does not use. With AVX-512's products
    of pairs, which it does use, it is ahead for any number of rows (Zen 4: 44 ms a step of 32 rows, torch 70), and
    without either torch is slower still. A rule and not a measurement, so that two processes on one machine compute
    the same.
    """
    features = get_host_cpu_features()
    return _TORCH_ABOVE_ROWS if any(features.get(name) for name in _MATRIX_FEATURES) else None
