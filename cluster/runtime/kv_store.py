"""The memory of the paged KV cache and how many blocks of it a machine can afford."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from cluster.runtime.model_spec import KVHeads


class HasKV(Protocol):
    """A model's spec, as far as its cache goes."""

    @property
    def kv_heads(self) -> tuple[KVHeads, ...]:
        """What each layer keeps of a token."""


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Owns the key and value memory of every layer; which sequence owns which block is decided elsewhere."""

    keys: tuple[Tensor, ...]  # per layer [num_blocks + has_padding_block, block_size, num_kv_heads, head_dim]
    values: tuple[Tensor, ...]  # per layer, same shape
    has_padding_block: bool = False

    @classmethod
    def allocate(
        cls,
        spec: HasKV,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        has_padding_block: bool = False,
    ) -> KVCache:
        """Zeroed, so that unwritten slots hold finite numbers; on the CPU, pages are only touched on use.

        has_padding_block: one more block than num_blocks, that no sequence is ever given, for rows of padding.
        """
        count = num_blocks + has_padding_block
        shapes = [(2, count, block_size, layer.num_heads, layer.head_dim) for layer in spec.kv_heads]
        memory = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        return cls(tuple(layer[0] for layer in memory), tuple(layer[1] for layer in memory), has_padding_block)

    @property
    def layers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values, layer by layer."""
        return zip(self.keys, self.values, strict=True)

    @property
    def num_blocks(self) -> int:
        """Blocks for sequences; their ids are below this."""
        return self.keys[0].shape[0] - self.has_padding_block

    @property
    def padding_block(self) -> int:
        if not self.has_padding_block:
            raise ValueError("this cache has no padding block")
        return self.num_blocks

    @property
    def block_size(self) -> int:
        return self.keys[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


def bytes_per_block(spec: HasKV, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    per_token = sum(2 * layer.num_heads * layer.head_dim for layer in spec.kv_heads)
    return block_size * per_token * dtype.itemsize


def num_blocks_for(memory_fraction: float, block_bytes: int, total_bytes: int, most: int) -> int:
    """Blocks that fit in a fraction of memory, at most `most` (what a full batch of longest sequences needs)."""
    return min(int(memory_fraction * total_bytes) // block_bytes, most)


def total_memory(device: torch.device) -> int:
    """Bytes of memory that this process could use at most: the device's, or the machine's within its cgroup's limit."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *cgroup_limits(Path("/sys/fs/cgroup"))])


def cgroup_limits(root: Path) -> list[int]:
    """Limits seen from inside a container, for cgroup v2 and v1; none set gives none."""
    files = (root / "memory.max", root / "memory" / "memory.limit_in_bytes")
    texts = [file.read_text().strip() for file in files if file.is_file()]
    return [int(text) for text in texts if text.isdigit()]
