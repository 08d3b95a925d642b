"""Block tables: which physical block holds each run of `block_size` token slots of a request.

    token slots   0 ........ block_size ........ 2 * block_size ........ num_tokens
    block table   | table[0] | table[1]          | table[2] (its tail unused)  |

Rolling back is forgetting: slots past what a request has computed are overwritten by the next step, and whole blocks
past it go back to the pool.
"""

from __future__ import annotations

from cluster.core.block_pool import BlockPool


class KVCacheManager:
    """Owns the block table of every request that holds KV memory."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.pool = pool
        self.block_size = block_size
        self._tables: dict[str, list[int]] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` token slots need."""
        return -(-num_tokens // self.block_size)

    def allocate_slots(self, request_id: str, num_tokens: int) -> bool:
        """Grow a request's table to cover `num_tokens` slots in all; False and no change if the pool has too few."""
        table = self._tables.get(request_id, ())
        num_missing = self.num_blocks_for(num_tokens) - len(table)
        if num_missing <= 0:
            return True
        block_ids = self.pool.allocate(num_missing)
        if block_ids is None:
            return False
        self._tables.setdefault(request_id, []).extend(block_ids)
        return True

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Give back the blocks past `num_tokens` slots. A request that holds fewer is left alone."""
        table = self._tables.get(request_id)
        if table is None:
            return
        num_kept = self.num_blocks_for(num_tokens)
        if num_kept < len(table):
            self.pool.free(table[num_kept:])
            del table[num_kept:]

    def free(self, request_id: str) -> None:
        """Give back everything a request holds; one that holds nothing is ignored."""
        self.pool.free(self._tables.pop(request_id, ()))

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """The request's physical blocks in order; empty if it holds none."""
        return tuple(self._tables.get(request_id, ()))

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the tables and the pool agree. For a pool that only this manager uses."""
        self.pool.check_integrity(self._tables.values())
