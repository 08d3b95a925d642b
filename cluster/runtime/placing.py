"""Host arrays to where a step is computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

Place = Callable[[NDArray[Any]], Tensor]


def placer(device: torch.device) -> Place:
    """What makes tensors on the device out of arrays; on a CPU they share the array's memory."""
    return torch.from_numpy if device.type == "cpu" else partial(_copy, device)


def _copy(device: torch.device, array: NDArray[Any]) -> Tensor:
    """To CUDA by way of page-locked memory: from any other, a copy first waits for all work that is queued."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
