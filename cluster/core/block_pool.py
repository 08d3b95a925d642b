"""Physical KV blocks: which are free, and how many block tables hold each of the others."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from cluster.core.prefix_cache import IntegrityError as IntegrityError  # re-exported
from cluster.core.prefix_cache import PrefixCache


class BlockPool:
    """Owns the free list and the reference counts of `num_blocks` fixed-size KV blocks.

    A block's reference count is the number of block tables that hold it. One that nobody holds is free: in the free
    list, or idle in the cache if what it holds is known there. Idle blocks are used up only after the free list.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.peak_used = 0
        self.cache = PrefixCache()
        self._free = deque(range(num_blocks))
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, idle cached ones included."""
        return len(self._free) + self.cache.num_idle

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` free blocks with one reference each, or None and no change when there are fewer."""
        if num_blocks > self.num_free:
            return None
        block_ids = [self._free.popleft() if self._free else self.cache.evict() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block. Raises IntegrityError for one that is neither held nor cached."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self.cache.wake(block_id)
            self._ref_counts[block_id] += 1
        self.peak_used = max(self.peak_used, self.num_used)

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference from each block, in order; one without any is free again.

        Of a table, the last block comes first: see PrefixCache. Raises IntegrityError for a block that is free already.
        """
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                raise IntegrityError(f"block {block_id} is freed twice")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._release(block_id)

    def _release(self, block_id: int) -> None:
        if block_id in self.cache:
            self.cache.rest(block_id)
        else:
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
            if (ref_count == 0 and block_id not in self.cache) != (block_id in free):
                raise IntegrityError(f"block {block_id} has {ref_count} references; free: {block_id in free}")
        self.cache.check_integrity(lambda block_id: self._ref_counts[block_id] > 0)
