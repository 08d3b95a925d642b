"""Physical KV blocks: which are free, and how many block tables hold each of the others."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence


class IntegrityError(RuntimeError):
    """The books of a block pool or of its tables do not add up: a bug, never a caller's mistake."""


class BlockPool:
    """Owns the free list and the reference counts of `num_blocks` fixed-size KV blocks.

    A block's reference count is the number of block tables that hold it. Freed blocks go to the back of the free
    list, so that the contents of the longest-free block are overwritten first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.peak_used = 0
        self._free = deque(range(num_blocks))
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` free blocks with one reference each, or None and no change when there are fewer."""
        if num_blocks > len(self._free):
            return None
        block_ids = [self._free.popleft() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block. Raises IntegrityError for a block that nobody holds."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                raise IntegrityError(f"block {block_id} is free and cannot be shared")
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference from each block; one without any goes back to the free list.

        Raises IntegrityError for a block that is free already.
        """
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                raise IntegrityError(f"block {block_id} is freed twice")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free.append(block_id)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise IntegrityError unless `tables`, all of them, account for every block that is not free."""
        held = Counter(block_id for table in tables for block_id in table)
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError("a block is in the free list twice")
        for block_id, ref_count in enumerate(self._ref_counts):
            if ref_count != held[block_id]:
                raise IntegrityError(f"block {block_id} has {ref_count} references but {held[block_id]} holders")
            if (ref_count == 0) != (block_id in free):
                raise IntegrityError(f"block {block_id} has {ref_count} references; free: {block_id in free}")
