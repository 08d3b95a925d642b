"""Blocks are handed out whole, counted per table, and never lost."""

from __future__ import annotations

import pytest

from cluster.core.block_pool import BlockPool, IntegrityError
from cluster.core.kv_cache import KVCacheManager

pytestmark = pytest.mark.unit


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(2) is None
    assert (pool.num_free, pool.num_used) == (1, 2)


def test_the_block_that_was_freed_last_is_reused_last() -> None:
    pool = BlockPool(3)
    pool.allocate(3)
    pool.free([2, 0])
    assert pool.allocate(2) == [2, 0]


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    block_ids = pool.allocate(1)
    assert block_ids is not None
    pool.share(block_ids)
    assert pool.ref_count(block_ids[0]) == 2
    pool.free(block_ids)
    assert pool.num_free == 1
    pool.free(block_ids)
    assert pool.num_free == 2


def test_the_peak_survives_a_drain() -> None:
    pool = BlockPool(4)
    pool.free(pool.allocate(3) or [])
    assert (pool.num_used, pool.peak_used) == (0, 3)


def test_freeing_or_sharing_a_free_block_is_an_error() -> None:
    pool = BlockPool(2)
    with pytest.raises(IntegrityError, match="freed twice"):
        pool.free([0])
    with pytest.raises(IntegrityError, match="cannot be shared"):
        pool.share([0])


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)
    with pytest.raises(ValueError, match="block_size"):
        KVCacheManager(BlockPool(1), 0)


def test_the_check_finds_a_leak_and_a_double_holder() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool.check_integrity([[0]])
    with pytest.raises(IntegrityError, match="1 references but 0 holders"):
        pool.check_integrity([])
    with pytest.raises(IntegrityError, match="1 references but 2 holders"):
        pool.check_integrity([[0], [0]])


def test_a_table_grows_by_whole_blocks_and_only_when_it_must() -> None:
    kv = KVCacheManager(BlockPool(3), block_size=4)
    assert kv.allocate_slots("a", 5)
    assert kv.block_table("a") == (0, 1)
    assert kv.allocate_slots("a", 8)
    assert kv.block_table("a") == (0, 1)
    assert not kv.allocate_slots("a", 13)
    assert kv.block_table("a") == (0, 1)


def test_truncating_gives_back_whole_blocks_only() -> None:
    kv = KVCacheManager(BlockPool(3), block_size=4)
    kv.allocate_slots("a", 12)
    kv.truncate("a", 5)
    assert kv.block_table("a") == (0, 1)
    kv.truncate("a", 100)
    assert kv.block_table("a") == (0, 1)
    kv.truncate("nobody", 0)
    kv.check_integrity()


def test_freeing_a_request_twice_is_harmless() -> None:
    kv = KVCacheManager(BlockPool(3), block_size=4)
    kv.allocate_slots("a", 12)
    kv.free("a")
    kv.free("a")
    assert kv.block_table("a") == ()
    assert kv.pool.num_free == 3
