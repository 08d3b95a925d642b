"""The ranks of one replica and what they say to each other: partial sums, columns of logits, and step frames.

Rank 0 decides; the others follow. A collective is a plain exchange of messages between pairs of ranks, and what is
added is added in the order of the ranks. So a sum has the same bits on every rank, whatever else is in the batch; a
ring all-reduce would add in an order that depends on where in the batch a number lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

COLLECTIVE_TIMEOUT_S = 10.0  # longest wait of a rank for the others within a step, or for a word from rank 0
_LOOPBACK = "127.0.0.1"  # ranks of a group share a machine
_DATA, _CONTROL = 1, 2  # message tags


class Work(Protocol):
    """A message under way."""

    def wait(self) -> Any:
        """Raises RuntimeError when the peer has gone or the timeout has passed."""


@dataclass(frozen=True, slots=True, eq=False)
class _Links:
    """Connections to the other ranks: for words on the host, and for tensors where the model is."""

    control: Any  # ProcessGroupGloo
    data: Any  # the same, or ProcessGroupNCCL


class TPGroup:
    """One rank's membership in its group. One thread at a time.

    Until it has joined, a rank is alone: sums and columns are its own part's, which serves to warm up.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        self._links: _Links | None = None
        self._others = [other for other in range(size) if other != rank]

    def join(self, store: Store, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        """Connect to the others, who must do the same now. Raises RuntimeError when they do not."""
        control = _gloo(PrefixStore("control", store), self.rank, self.size, timeout_s)
        data = control
        if self._device.type == "cuda":
            data = _nccl(PrefixStore("data", store), self.rank, self.size, timeout_s)
        self._links = _Links(control, data)

    # --- tensors -----------------------------------------------------------------------------------------------------

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, in the order of ranks, on every rank. Parts have the same shape and dtype."""
        if self._links is None:
            return part
        if self._device.type == "cuda":
            return self._sum_on_cuda(self._links.data, part.contiguous())
        parts = [part.contiguous() if rank == self.rank else torch.empty_like(part) for rank in range(self.size)]
        link = self._links.data
        received = [link.recv([parts[other]], other, _DATA) for other in self._others]
        sent = [link.send([parts[self.rank]], other, _DATA) for other in self._others]
        _wait(*received, *sent)
        return _sum(parts)

    def _sum_on_cuda(self, link: Any, part: Tensor) -> Tensor:
        if part.dtype != torch.float32:  # products of halves depend on the batch's shape anyway: take the fastest way
            total = part.clone()
            _wait(link.allreduce([total]))
            return total
        parts = [torch.empty_like(part) for _ in range(self.size)]
        _wait(link.allgather([parts], [part]))
        return _sum(parts)

    def gather_columns(self, part: Tensor, columns: list[range]) -> Tensor:
        """On rank 0 all ranks' columns [num_rows, all columns]; other ranks get their own part back.

        part: [num_rows, len(columns[rank])]; columns: of each rank, in order. Alone, others' columns are zero.
        """
        if self._links is None:
            before, after = columns[self.rank].start, columns[-1].stop - columns[self.rank].stop
            return F.pad(part, (before, after))
        if len(part) == 0:
            return part.new_empty((0, columns[-1].stop))
        if self.rank != 0:
            _wait(self._links.data.send([part.contiguous()], 0, _DATA))
            return part
        parts = [part.new_empty((len(part), len(columns[other]))) for other in self._others]
        pairs = zip(self._others, parts, strict=True)
        _wait(*(self._links.data.recv([received], other, _DATA) for other, received in pairs))
        return torch.cat([part, *parts], dim=1)

    # --- words -------------------------------------------------------------------------------------------------------

    def tell(self, words: NDArray[np.int32]) -> None:
        """Rank 0 sends words to every other rank."""
        message, link = torch.from_numpy(words), self._joined().control
        _wait(*(link.send([message], other, _CONTROL) for other in self._others))

    def hear(self, words: NDArray[np.int32]) -> None:
        """Fill `words` with rank 0's."""
        _wait(self._joined().control.recv([torch.from_numpy(words)], 0, _CONTROL))

    def answer(self) -> None:
        """Tell rank 0 that this rank is there."""
        _wait(self._joined().control.send([torch.zeros(1, dtype=torch.int32)], 0, _CONTROL))

    def await_answers(self) -> None:
        """Wait for every other rank's answer()."""
        link = self._joined().control
        answers = [torch.zeros(1, dtype=torch.int32) for _ in self._others]
        pairs = zip(self._others, answers, strict=True)
        _wait(*(link.recv([answer], other, _CONTROL) for other, answer in pairs))

    def abort(self) -> None:
        """Break off whatever waits on the device; any thread may call it."""
        if self._links is not None and self._device.type == "cuda":
            self._links.data.abort()

    def _joined(self) -> _Links:
        if self._links is None:
            raise RuntimeError("this rank has not joined its group")
        return self._links


def _sum(parts: list[Tensor]) -> Tensor:
    """In the given order."""
    return reduce(Tensor.add_, parts[2:], reduce(Tensor.add, parts[:2]))


def _wait(*works: Work) -> None:
    for work in works:
        work.wait()


def _gloo(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._threads = 1
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, size, options)
