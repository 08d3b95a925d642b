"""What is taken from the prefix cache, what is put there, and what gives way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cluster.core.block_pool import BlockPool, IntegrityError
from cluster.core.kv_cache import KVCacheManager
from cluster.core.prefix_cache import BlockContent, PrefixCache, TokenChain, root_key
from cluster.messages.request import HoldMode
from cluster.messages.rounds import Abort, Close, Commit, Committed, DraftBlock, Open, Submit
from tests.engines import BLOCK_SIZE, Pool, draft_pool, plain_output, target_pool
from tests.fakes import sampling

pytestmark = pytest.mark.unit

PROMPT = tuple(range(1, 22))  # five full blocks and one token


def filled(kv: KVCacheManager, request_id: str, token_ids: Sequence[int], tenant: str = "A") -> None:
    """Admit a request and compute all of its tokens."""
    assert kv.admit(request_id, TokenChain(tenant, token_ids)) is not None
    kv.publish(request_id, len(token_ids))
    kv.check_integrity()


def found(kv: KVCacheManager, token_ids: Sequence[int], tenant: str = "A") -> int | None:
    num_tokens = kv.admit("probe", TokenChain(tenant, token_ids))
    kv.check_integrity()
    kv.free("probe")
    return num_tokens


def caching(num_blocks: int = 16, block_size: int = 4) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks), block_size, prefix_cache=True)


# --- keys ------------------------------------------------------------------------------------------------------------


def test_a_key_stands_for_the_whole_prefix_and_its_tenant() -> None:
    keys = {
        TokenChain(tenant, tokens).block(1, 2).key
        for tenant in ("A", "B", "")
        for tokens in ((1, 2, 3, 4), (1, 2, 4, 3), (2, 1, 3, 4), (1, 2, 3, 4, 5))
    }
    assert len(keys) == 9  # what follows a block does not change its key


def test_tokens_cannot_imitate_another_tenants_root() -> None:
    root = root_key("victim")
    as_tokens = [int.from_bytes(root[i : i + 4], "little", signed=True) for i in range(0, len(root), 4)]
    chain = TokenChain("attacker", [*as_tokens, 7])
    assert all(chain.block(index, 1).key != TokenChain("victim", [7]).block(0, 1).key for index in range(9))


def test_two_contents_with_one_key_are_never_taken_for_each_other() -> None:
    cache = PrefixCache()
    content = BlockContent("A", root_key("A"), b"tokens", b"key")
    assert cache.add(0, content)
    for other in (replace(content, token_ids=b"others"), replace(content, tenant="B"), replace(content, parent=b"x")):
        assert cache.find(other) is None
        assert not cache.add(1, other)
    assert cache.find(content) == 0


def test_keys_follow_the_sequences_own_list() -> None:
    token_ids = [1, 2]
    chain = TokenChain("A", token_ids)
    first = chain.block(0, 2)
    token_ids += [3, 4]
    assert chain.block(0, 2) == first
    assert chain.block(1, 2) == TokenChain("A", (1, 2, 3, 4)).block(1, 2)


# --- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "num_found"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_the_longest_run_of_full_blocks_is_found_but_never_the_last_token(num_tokens: int, num_found: int) -> None:
    kv = caching()
    filled(kv, "a", range(13))
    assert found(kv, range(num_tokens)) == num_found


def test_a_prefix_is_found_up_to_the_first_difference() -> None:
    kv = caching()
    filled(kv, "a", range(13))
    assert found(kv, [*range(6), 0, *range(7, 13)]) == 4


def test_another_tenant_finds_nothing() -> None:
    kv = caching()
    filled(kv, "a", range(13), tenant="A")
    assert found(kv, range(13), tenant="B") == 0


def test_what_is_not_computed_is_not_found() -> None:
    kv = caching()
    assert kv.admit("a", TokenChain("A", range(13))) == 0
    kv.publish("a", 7)
    assert found(kv, range(13)) == 4


def test_shared_blocks_are_held_by_both_and_survive_either() -> None:
    kv = caching()
    filled(kv, "a", range(9))
    assert kv.admit("b", TokenChain("A", range(9))) == 8
    assert kv.block_table("a")[:2] == kv.block_table("b")[:2]
    assert kv.block_table("a")[2] != kv.block_table("b")[2]
    assert (kv.pool.num_used, kv.pool.ref_count(kv.block_table("a")[0])) == (4, 2)
    kv.free("a")
    kv.check_integrity()
    assert kv.pool.ref_count(kv.block_table("b")[0]) == 1


def test_freed_blocks_stay_known_and_count_as_free() -> None:
    kv = caching()
    filled(kv, "a", range(9))
    kv.free("a")
    assert (kv.pool.num_free, kv.prefix_stats().num_blocks) == (16, 2)
    assert found(kv, range(9)) == 8


def test_idle_blocks_are_used_up_last_and_the_end_of_a_prefix_first() -> None:
    kv = caching(num_blocks=4)
    filled(kv, "a", range(13))  # three known blocks and a fourth
    kv.free("a")
    assert kv.allocate_slots("b", 4)
    assert found(kv, range(13)) is None  # no room for the rest
    assert found(kv, range(12)) == 8
    assert kv.allocate_slots("b", 8)
    assert found(kv, range(9)) is None
    assert found(kv, range(8)) == 4
    kv.allocate_slots("b", 16)
    kv.free("b")
    assert found(kv, range(13)) == 0


def test_the_prefix_that_was_used_last_gives_way_last() -> None:
    kv = caching(num_blocks=4, block_size=4)
    for request_id, tokens in (("old", range(5)), ("new", range(50, 55))):
        filled(kv, request_id, tokens)
        kv.free(request_id)
    assert found(kv, range(5)) == 4
    kv.allocate_slots("other", 12)
    kv.free("other")
    assert (found(kv, range(50, 55)), found(kv, range(5))) == (0, 4)


def test_an_admission_that_does_not_fit_changes_nothing() -> None:
    kv = caching(num_blocks=4)
    filled(kv, "a", range(9))
    assert kv.admit("b", TokenChain("A", range(9)), num_spare=1) is None
    assert (kv.block_table("b"), kv.pool.num_free) == ((), 1)
    assert kv.admit("b", TokenChain("A", range(9))) == 8
    assert kv.prefix_stats().num_query_tokens == 18


def test_an_idle_block_that_is_taken_is_not_free_for_the_rest_of_the_same_request() -> None:
    kv = caching(num_blocks=3)
    filled(kv, "a", range(9))
    kv.free("a")
    kv.allocate_slots("b", 4)  # takes the block that was never full
    assert kv.admit("c", TokenChain("A", range(9))) is None
    kv.check_integrity()


def test_a_block_that_becomes_equal_to_a_known_one_is_given_back_for_it() -> None:
    kv = caching()
    chain = TokenChain("A", range(9))
    assert kv.admit("a", chain) == kv.admit("b", TokenChain("A", range(9))) == 0
    kv.publish("a", 9)
    assert kv.block_table("a")[0] != kv.block_table("b")[0]
    kv.publish("b", 9)
    kv.check_integrity()
    assert kv.block_table("a")[:2] == kv.block_table("b")[:2]
    assert kv.pool.num_used == 4


def test_a_cut_inside_a_known_block_is_a_bug() -> None:
    kv = caching()
    filled(kv, "a", range(9))
    kv.truncate("a", 8)
    with pytest.raises(IntegrityError, match="cannot be cut to 7 tokens"):
        kv.truncate("a", 7)


def test_without_the_cache_nothing_is_known() -> None:
    kv = KVCacheManager(BlockPool(16), 4)
    filled(kv, "a", range(13))
    assert found(kv, range(13)) == 0
    assert (kv.prefix_stats().num_blocks, kv.prefix_stats().num_query_tokens) == (0, 0)


@pytest.mark.parametrize("flaw", ["lost parent", "held but idle", "foreign key", "order"])
def test_the_check_finds_a_cache_that_does_not_add_up(flaw: str) -> None:
    kv = caching()
    filled(kv, "a", range(9))
    cache, (first, second, _) = kv.pool.cache, kv.block_table("a")
    match flaw:
        case "lost parent":
            del cache._block_ids[cache._contents.pop(first).key]
        case "held but idle":
            cache.rest(second)
        case "foreign key":
            cache._block_ids[b"foreign"] = second
        case "order":
            kv.free("a")
            cache._idle.move_to_end(second)
    with pytest.raises(IntegrityError):
        kv.check_integrity()


# --- the target ------------------------------------------------------------------------------------------------------


def submit(request_id: str, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 6, **fields: object) -> Submit:
    return replace(Submit(request_id, prompt, sampling(max_tokens, ignore_eos=True)), **fields)  # type: ignore[arg-type]


def rows(pool: Pool) -> int:
    """How many rows went through the model."""
    return sum(step.num_scheduled_tokens for step in pool.runner.steps)


def run(pool: Pool, *commands: object) -> list[int]:
    """Serve commands to their end; what the first commit of each submission said of cached tokens."""
    pool.engine.handle(list(commands))
    pool.run()
    for command in commands:
        if isinstance(command, Submit):
            assert command.output_token_ids + pool.output(command.request_id) == plain_output(command)
    firsts = {event.request_id: event.num_cached_tokens for event in reversed(pool.of(Commit))}
    assert sum(event.num_cached_tokens for event in pool.of(Commit)) == sum(firsts.values())
    return [firsts[command.request_id] for command in commands if isinstance(command, Submit)]


def test_the_second_turn_of_a_chat_computes_only_what_is_new() -> None:
    pool = target_pool()
    assert run(pool, submit("first")) == [0]
    history = PROMPT + plain_output(submit("first"))  # 27 tokens, of which the last was never computed
    before = rows(pool)
    assert run(pool, submit("second", (*history, 30, 31, 32), max_tokens=1)) == [24]
    assert rows(pool) - before == len(history) + 3 - 24
    assert pool.is_free()


def test_a_tenant_gets_nothing_from_another() -> None:
    pool = target_pool()
    run(pool, submit("a", tenant="A"))
    before = rows(pool)
    assert run(pool, submit("b", tenant="B")) == [0]
    assert rows(pool) - before == len(PROMPT) + 5
    assert run(pool, submit("c", tenant="A")) == [20]


def test_outputs_of_one_prompt_that_start_together_compute_its_full_blocks_once() -> None:
    pool = target_pool()
    together = [submit(f"r{i}", max_tokens=1, sampling=sampling(1, seed=i)) for i in range(4)]
    assert run(pool, *together) == [0, 20, 20, 20]
    assert rows(pool) == len(PROMPT) + 3
    assert pool.kv.pool.peak_used <= 6 + 3 * 6  # each had room for its whole prompt at first
    assert [len(step.scheduled) for step in pool.runner.steps] == [1, 3]


def test_outputs_of_one_prompt_hold_its_full_blocks_together() -> None:
    pool = target_pool()
    pool.engine.handle([submit(f"r{i}", sampling=sampling(20, seed=i, ignore_eos=True)) for i in range(4)])
    for _ in range(2):
        pool.engine.step()
    tables = [pool.kv.block_table(f"r{i}") for i in range(4)]
    assert len({table[:5] for table in tables}) == 1
    assert pool.kv.pool.num_used == 5 + 4


def test_a_chunked_prompt_is_followed_block_by_block() -> None:
    pool = target_pool(max_num_batched_tokens=6)
    assert run(pool, submit("a", max_tokens=1), submit("b", max_tokens=1)) == [0, 20]
    assert rows(pool) == len(PROMPT) + 1


def test_a_sequence_does_not_wait_for_one_that_is_gone() -> None:
    pool = target_pool(max_num_batched_tokens=6)
    a, b = submit("a", max_tokens=3), submit("b", max_tokens=3)
    pool.engine.handle([a, b])
    pool.engine.step()
    pool.engine.handle([Abort("a")])
    pool.run()
    assert pool.output("b") == plain_output(b)
    assert pool.is_free()


def test_what_a_sequence_had_before_its_preemption_is_no_saving() -> None:
    pool = target_pool(num_blocks=12, max_num_batched_tokens=2)  # "low" reads one token a step
    low = submit("low", tuple(range(1, 33)), max_tokens=8, priority=1)
    high = submit("high", tuple(range(40, 49)), max_tokens=12)
    cached = run(pool, low, high)
    assert pool.engine.stats().num_preemptions > 0
    assert cached == [0, 0]
    assert pool.engine.stats().prefix_cache.num_hit_tokens > 0
    assert pool.is_free()


def test_a_resumed_request_reports_no_cached_tokens() -> None:
    pool = target_pool()
    run(pool, submit("a", max_tokens=6))
    output = plain_output(submit("a"))
    before = rows(pool)
    assert run(pool, submit("b", output_token_ids=output[:4], max_tokens=6)) == [0]
    assert rows(pool) - before == 25 - 24 + 1


def test_guesses_that_were_rejected_never_get_in() -> None:
    pool = target_pool(hold=HoldMode.NEVER)
    request = submit("a", PROMPT[:4], max_tokens=9, max_draft_tokens=8)
    truth = plain_output(request)
    wrong = tuple((token + 1) % 50 for token in truth)
    pool.engine.handle([request])
    pool.engine.step()
    pool.engine.handle([DraftBlock("a", 5, wrong[1:9])])
    pool.run()
    assert pool.of(Commit)[1].num_draft_tokens > 0
    known = {content.token_ids for content in pool.kv.pool.cache._contents.values()}
    chain = TokenChain("default", PROMPT[:4] + truth)
    assert known == {chain.block(index, BLOCK_SIZE).token_ids for index in range(3)}


def test_guesses_that_were_accepted_in_the_last_step_get_in() -> None:
    pool = target_pool(hold=HoldMode.NEVER)
    request = submit("a", PROMPT[:4], max_tokens=9, max_draft_tokens=8)
    pool.engine.handle([request])
    pool.engine.step()
    pool.engine.handle([DraftBlock("a", 5, plain_output(request)[1:8])])
    pool.run()
    assert pool.of(Commit)[-1].num_accepted_tokens == 7
    assert pool.engine.stats().prefix_cache.num_blocks == 12 // BLOCK_SIZE


# --- the draft -------------------------------------------------------------------------------------------------------


def opened(request_id: str, token_ids: tuple[int, ...] = PROMPT, tenant: str = "A", draft_len: int = 2) -> Open:
    return Open(request_id, 0, token_ids, sampling(), draft_len, tenant)


def test_a_draft_reads_only_what_no_earlier_session_of_its_tenant_has_read() -> None:
    pool = draft_pool()
    for command in (opened("a"), Committed("a", 0, len(PROMPT), (40, 41, 42, 43), 2), Close("a")):
        pool.engine.handle([command])
        pool.run()
    for tenant, num_rows in (("A", 1), ("B", 25)):  # the last token's row; that of the first guess follows in a chain
        before = rows(pool)
        pool.engine.handle([opened(f"again {tenant}", (*PROMPT, 40, 41, 42, 43), tenant)])
        pool.run()
        assert rows(pool) - before == num_rows


def test_guesses_of_a_draft_get_in_when_they_are_committed() -> None:
    pool = draft_pool()
    pool.engine.handle([opened("a", draft_len=8)])
    pool.run()
    (block,) = pool.of(DraftBlock)
    assert pool.engine.stats().prefix_cache.num_blocks == 5
    pool.engine.handle([Committed("a", 0, len(PROMPT), block.token_ids, 0), Close("a")])
    pool.run()
    assert pool.engine.stats().prefix_cache.num_blocks == 7  # 29 tokens, the last of which was never read


def test_sessions_that_start_together_read_a_long_prompt_once() -> None:
    pool = draft_pool()
    prompt = tuple(number % 50 for number in range(61))
    pool.engine.handle([opened(f"s{index}", prompt, draft_len=1) for index in range(3)])
    pool.run()
    assert rows(pool) == 61 + 2
    pool.engine.handle([Close(f"s{index}") for index in range(3)])
    pool.run()
    assert pool.is_free()


def test_a_session_that_finds_all_it_may_find_still_drafts() -> None:
    pool = draft_pool()
    prompt = tuple(number % 50 for number in range(33))  # a step's rows and one
    pool.engine.handle([opened("a", prompt, draft_len=0), opened("b", prompt, draft_len=0)])
    pool.run()
    pool.engine.handle([Committed("b", 0, 33, (1,), 2)])
    pool.run()
    (block,) = pool.of(DraftBlock)
    assert (block.committed_len, block.token_ids) == (34, pool.runner.model.continuation((*prompt, 1), sampling(), 2))
    assert pool.engine.faults.total == 0
