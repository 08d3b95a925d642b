"""Block tables under any order of growing, cutting back and freeing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.acceptance import accept_equal
from cluster.core.block_pool import BlockPool
from cluster.core.kv_cache import KVCacheManager

pytestmark = pytest.mark.property

request_ids = st.sampled_from(["a", "b", "c"])
operations = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), request_ids, st.integers(0, 40)),
        st.tuples(st.just("truncate"), request_ids, st.integers(0, 40)),
        st.tuples(st.just("free"), request_ids, st.just(0)),
    ),
    max_size=40,
)


def run(kv: KVCacheManager, operation: tuple[str, str, int]) -> None:
    name, request_id, num_tokens = operation
    before = kv.block_table(request_id), kv.pool.num_free
    if name == "grow":
        if kv.allocate_slots(request_id, num_tokens):
            assert kv.block_table(request_id)[: len(before[0])] == before[0]
            assert len(kv.block_table(request_id)) == max(len(before[0]), kv.num_blocks_for(num_tokens))
        else:
            assert (kv.block_table(request_id), kv.pool.num_free) == before
            assert kv.num_blocks_for(num_tokens) - len(before[0]) > before[1]
    elif name == "truncate":
        kv.truncate(request_id, num_tokens)
        assert kv.block_table(request_id) == before[0][: kv.num_blocks_for(num_tokens)]
    else:
        kv.free(request_id)


@given(operations, st.integers(1, 12), st.integers(1, 5))
def test_blocks_are_conserved_and_no_two_requests_share_a_slot(
    operations: list[tuple[str, str, int]], num_blocks: int, block_size: int
) -> None:
    kv = KVCacheManager(BlockPool(num_blocks), block_size)
    for operation in operations:
        run(kv, operation)
        kv.check_integrity()
        held = [block_id for request_id in "abc" for block_id in kv.block_table(request_id)]
        assert len(held) == len(set(held)) == kv.pool.num_used
        assert kv.pool.num_used + kv.pool.num_free == num_blocks
        assert kv.pool.num_used <= kv.pool.peak_used <= num_blocks
    for request_id in "abc":
        kv.free(request_id)
    assert kv.pool.num_free == num_blocks


@given(st.integers(1, 30), st.integers(0, 8), st.integers(0, 8), st.integers(1, 5))
def test_lookahead_that_is_cut_back_leaves_what_plain_growth_leaves(
    num_tokens: int, num_guesses: int, num_accepted: int, block_size: int
) -> None:
    kept = num_tokens + min(num_guesses, num_accepted)
    drafting, plain = (KVCacheManager(BlockPool(60), block_size) for _ in range(2))
    drafting.allocate_slots("a", num_tokens + num_guesses)
    drafting.truncate("a", kept)
    plain.allocate_slots("a", kept)
    assert drafting.block_table("a") == plain.block_table("a")
    assert drafting.pool.num_free == plain.pool.num_free


@given(st.lists(st.integers(0, 2), max_size=8), st.data())
def test_equal_acceptance_emits_the_targets_own_tokens_up_to_the_first_difference(
    draft: list[int], data: st.DataObject
) -> None:
    sampled = data.draw(st.lists(st.integers(0, 2), min_size=len(draft) + 1, max_size=len(draft) + 1))
    result = accept_equal(draft, sampled)
    assert 1 <= len(result.emitted) == result.num_accepted + 1 <= len(draft) + 1
    assert result.emitted == tuple(sampled[: len(result.emitted)])
    assert draft[: result.num_accepted] == sampled[: result.num_accepted]
    if result.num_accepted < len(draft):
        assert draft[result.num_accepted] != sampled[result.num_accepted]


def test_equal_acceptance_refuses_a_wrong_number_of_samples() -> None:
    with pytest.raises(ValueError, match="2 draft tokens need one more sample, got 2"):
        accept_equal([1, 2], [1, 2])
