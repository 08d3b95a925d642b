"""Block tables: which physical block holds each run of `block_size` token slots of a request.

    token slots   0 ........ block_size ........ 2 * block_size ........ num_tokens
    block table   | table[0] | table[1]          | table[2] (its tail unused)  |
    published     | num_published blocks: cached, maybe shared, never written again | this request's own |

Rolling back is forgetting: slots past what a request has computed are overwritten by the next step, and whole blocks
past it go back to the pool. Only blocks full of committed tokens are published, so no roll-back reaches them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.core.block_pool import BlockPool, IntegrityError
from cluster.core.prefix_cache import BlockContent, TokenChain
from cluster.core.step import PrefixCacheStats


@dataclass(slots=True)
class _Table:
    block_ids: list[int] = field(default_factory=list)
    chain: TokenChain | None = None  # None: it is not in the prefix cache's books
    num_published: int = 0


class KVCacheManager:
    """Owns the block table of every request that holds KV memory. `prefix_cache`: full blocks are kept and shared."""

    def __init__(self, pool: BlockPool, block_size: int, prefix_cache: bool = False) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.pool = pool
        self.block_size = block_size
        self._has_cache = prefix_cache
        self._tables: dict[str, _Table] = {}
        self._num_query_tokens = 0
        self._num_hit_tokens = 0

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` token slots need."""
        return -(-num_tokens // self.block_size)

    def allocate_slots(self, request_id: str, num_tokens: int) -> bool:
        """Grow a request's table to cover `num_tokens` slots in all; False and no change if the pool has too few."""
        table = self._tables.get(request_id) or _Table()
        num_missing = self.num_blocks_for(num_tokens) - len(table.block_ids)
        if num_missing <= 0:
            return True
        block_ids = self.pool.allocate(num_missing)
        if block_ids is None:
            return False
        table.block_ids.extend(block_ids)
        self._tables[request_id] = table
        return True

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Give back the blocks past `num_tokens` slots. A request that holds fewer is left alone.

        Raises IntegrityError for a cut inside what is published: committed tokens are not rolled back.
        """
        table = self._tables.get(request_id)
        if table is None:
            return
        if num_tokens < table.num_published * self.block_size:
            raise IntegrityError(f"{request_id} cannot be cut to {num_tokens} tokens, inside a cached block")
        num_kept = self.num_blocks_for(num_tokens)
        if num_kept < len(table.block_ids):
            self.pool.free(reversed(table.block_ids[num_kept:]))
            del table.block_ids[num_kept:]

    def free(self, request_id: str) -> None:
        """Give back everything a request holds; one that holds nothing is ignored. What is cached stays known."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self.pool.free(reversed(table.block_ids))

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """The request's physical blocks in order; empty if it holds none."""
        table = self._tables.get(request_id)
        return () if table is None else tuple(table.block_ids)

    # --- prefixes ---

    def admit(self, request_id: str, chain: TokenChain, num_spare: int = 0) -> int | None:
        """Give a request that holds nothing slots for all of its tokens, cached blocks first.

        Returns how many of its tokens have KV already, all but the last at most: that one's row is what is sampled
        from. None and no change if that would leave fewer than `num_spare` blocks free.
        """
        found = self._find(chain, 0)
        num_woken = sum(self.pool.ref_count(block_id) == 0 for block_id in found)
        num_new = self.num_blocks_for(len(chain)) - len(found)
        if num_new + num_woken + num_spare > self.pool.num_free:
            return None
        self.pool.share(found)
        self._tables[request_id] = _Table(list(found), chain, len(found))
        self.allocate_slots(request_id, len(chain))
        self._num_query_tokens += len(chain) if self._has_cache else 0
        return self._count_hits(found)

    def catch_up(self, request_id: str, num_computed_tokens: int) -> int:
        """Put blocks that others have published meanwhile in place of those that a request has not filled yet.

        Returns how many of its tokens have KV now.
        """
        table = self._tables.get(request_id)
        start = num_computed_tokens // self.block_size
        if table is None or table.chain is None or table.num_published != start:
            return num_computed_tokens
        found = self._find(table.chain, start)
        for block_id in found:
            self._put(table, block_id)
        return start * self.block_size + self._count_hits(found) if found else num_computed_tokens

    def publish(self, request_id: str, num_tokens: int) -> None:
        """Make a request's full blocks known: its first `num_tokens` tokens are committed and have KV.

        Where an equal block is known already, it takes the place of the request's own. Of two contents with one key
        the second stays unknown, and so does what follows it.
        """
        table = self._tables.get(request_id)
        if table is None or table.chain is None or not self._has_cache:
            return
        while (table.num_published + 1) * self.block_size <= num_tokens:
            content = table.chain.block(table.num_published, self.block_size)
            known = self.pool.cache.find(content)
            if known is not None:
                self._put(table, known)
            elif self.pool.cache.add(table.block_ids[table.num_published], content):
                table.num_published += 1
            else:
                return

    def next_block(self, chain: TokenChain, num_computed_tokens: int) -> BlockContent | None:
        """The next block to be filled, if it is one that could come out of the cache instead."""
        index = num_computed_tokens // self.block_size
        return chain.block(index, self.block_size) if self._has_cache and index < self._num_sharable(chain) else None

    def prefix_stats(self) -> PrefixCacheStats:
        return PrefixCacheStats(len(self.pool.cache), self._num_query_tokens, self._num_hit_tokens)

    def _num_sharable(self, chain: TokenChain) -> int:
        """Blocks that hold neither the last token nor a gap."""
        return (len(chain) - 1) // self.block_size

    def _find(self, chain: TokenChain, start: int) -> list[int]:
        """The cached blocks from the start-th on, as far as they go without a gap."""
        found: list[int] = []
        for index in range(start, self._num_sharable(chain) if self._has_cache else 0):
            block_id = self.pool.cache.find(chain.block(index, self.block_size))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _put(self, table: _Table, block_id: int) -> None:
        """A cached block takes the place of the first one that is not published."""
        self.pool.free([table.block_ids[table.num_published]])
        self.pool.share([block_id])
        table.block_ids[table.num_published] = block_id
        table.num_published += 1

    def _count_hits(self, found: list[int]) -> int:
        num_tokens = len(found) * self.block_size
        self._num_hit_tokens += num_tokens
        return num_tokens

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the tables and the pool agree. For a pool that only this manager uses."""
        self.pool.check_integrity([table.block_ids for table in self._tables.values()])
        for request_id, table in self._tables.items():
            if not all(block_id in self.pool.cache for block_id in table.block_ids[: table.num_published]):
                raise IntegrityError(f"{request_id} holds a published block that is not cached")
