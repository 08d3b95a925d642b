"""Block tables that share cached blocks: in any order of events, every sequence reads its own tokens' KV."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.core.block_pool import BlockPool
from cluster.core.kv_cache import KVCacheManager
from cluster.core.prefix_cache import TokenChain
from cluster.core.prefix_sharing import PrefixSharing

pytestmark = pytest.mark.property

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # two ids, so that prefixes meet


class Member:
    """A sequence: committed tokens, and how many of them have KV."""

    def __init__(self, request_id: str, tenant: str, token_ids: list[int]) -> None:
        self.request_id = request_id
        self.token_ids = token_ids
        self.chain = TokenChain(tenant, token_ids)
        self.num_computed_tokens = 0

    def skip_to(self, num_tokens: int) -> None:
        assert self.num_computed_tokens <= num_tokens < len(self.token_ids)
        self.num_computed_tokens = num_tokens

    def kv(self, num_tokens: int) -> tuple[str, tuple[int, ...]]:
        """What a slot holds: the KV of a token depends on all tokens before it, and is its tenant's alone."""
        return self.chain.tenant, tuple(self.token_ids[:num_tokens])


class SharingMachine(RuleBasedStateMachine):
    """Admissions, computing, guesses, commits and ends of a few sequences over a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.members: dict[str, Member] = {}
        self.slots: dict[int, object] = {}
        self.num_made = 0

    @initialize(num_blocks=st.integers(4, 12), block_size=st.integers(1, 3))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.kv = KVCacheManager(BlockPool(num_blocks), block_size, prefix_cache=True)
        self.sharing = PrefixSharing(self.kv)

    def pick(self, data: st.DataObject) -> Member:
        return self.members[data.draw(st.sampled_from(sorted(self.members)))]

    @rule(tenant=st.sampled_from("AB"), token_ids=tokens, num_spare=st.integers(0, 2))
    def admit(self, tenant: str, token_ids: list[int], num_spare: int) -> None:
        member = Member(f"r{self.num_made}", tenant, token_ids)
        self.num_made += 1
        before = self.kv.pool.num_free
        if self.sharing.admit(member, num_spare):
            assert self.kv.pool.num_free >= num_spare
            assert len(self.kv.block_table(member.request_id)) == self.kv.num_blocks_for(len(token_ids))
            self.members[member.request_id] = member
        else:
            assert (self.kv.pool.num_free, self.kv.block_table(member.request_id)) == (before, ())

    @precondition(lambda self: self.members)
    @rule(data=st.data(), num_tokens=st.integers(1, 5))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        member = self.pick(data)
        if self.kv.allocate_slots(member.request_id, len(member.token_ids)):
            self.ingest(member, num_tokens)
            self.commit(member)

    def ingest(self, member: Member, num_tokens: int) -> None:
        end = min(len(member.token_ids), member.num_computed_tokens + num_tokens)
        for position in range(member.num_computed_tokens, end):
            self.write(member, position, member.kv(position + 1))
        member.num_computed_tokens = end

    def commit(self, member: Member) -> None:
        """The row of a last token samples the next one."""
        self.sharing.publish(member)
        if member.num_computed_tokens == len(member.token_ids):
            member.token_ids.append(1)

    @precondition(lambda self: self.members)
    @rule(data=st.data(), guesses=st.integers(1, 5), accepted=st.integers(0, 5))
    def guess(self, data: st.DataObject, guesses: int, accepted: int) -> None:
        """A decoding sequence verifies guesses; some are committed, and one token more."""
        member = self.pick(data)
        length = len(member.token_ids)
        if member.num_computed_tokens < length - 1 or not self.kv.allocate_slots(member.request_id, length + guesses):
            return
        before = self.kv.block_table(member.request_id)[: self.kv.num_blocks_for(length)]
        self.ingest(member, 1)
        for position in range(length, length + guesses):
            self.write(member, position, "a guess")
        accepted = min(accepted, guesses)
        member.token_ids.extend([1] * (accepted + 1))
        for position in range(length, length + accepted):
            self.slots[self.slot(member, position)] = member.kv(position + 1)  # what was guessed right is right
        member.num_computed_tokens = len(member.token_ids) - 1
        self.kv.truncate(member.request_id, member.num_computed_tokens)
        assert self.kv.block_table(member.request_id)[: len(before)] == before, "a roll-back took a committed token's"
        self.sharing.publish(member)

    @precondition(lambda self: len(self.members) > 1)
    @rule()
    def prefill_together(self) -> None:
        """One block each of those that are ready, all of them in one step."""
        prefilling = [
            member for member in self.members.values() if member.num_computed_tokens < len(member.token_ids) - 1
        ]
        ready = list(self.sharing.ready(prefilling))
        assert ready[:1] == prefilling[:1]
        size = self.kv.block_size
        ends = [(member, (member.num_computed_tokens // size + 1) * size) for member in ready]
        blocks = [member.kv(end) for member, end in ends if end < len(member.token_ids)]
        assert len(set(blocks)) == len(blocks), "a block is computed twice in a step"
        for member, end in ends:
            self.ingest(member, end - member.num_computed_tokens)
        for member in ready:
            self.commit(member)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.end(self.pick(data))

    def end(self, member: Member) -> None:
        self.kv.free(member.request_id)
        del self.members[member.request_id]

    def slot(self, member: Member, position: int) -> int:
        block_id = self.kv.block_table(member.request_id)[position // self.kv.block_size]
        return block_id * self.kv.block_size + position % self.kv.block_size

    def write(self, member: Member, position: int, value: object) -> None:
        block_id = self.kv.block_table(member.request_id)[position // self.kv.block_size]
        assert self.kv.pool.ref_count(block_id) == 1, "a shared block is written"
        assert block_id not in self.kv.pool.cache, "a cached block is written"
        self.slots[self.slot(member, position)] = value

    @invariant()
    def every_sequence_reads_its_own_kv(self) -> None:
        for member in self.members.values():
            for position in range(member.num_computed_tokens):
                assert self.slots[self.slot(member, position)] == member.kv(position + 1)

    @invariant()
    def the_books_agree(self) -> None:
        self.kv.check_integrity()
        pool, stats = self.kv.pool, self.kv.prefix_stats()
        assert pool.num_used == len({block for name in self.members for block in self.kv.block_table(name)})
        assert pool.num_free + pool.num_used == pool.num_blocks
        assert pool.num_used <= pool.peak_used
        assert stats.num_blocks == len(pool.cache) <= pool.num_blocks
        assert 0 <= stats.num_hit_tokens <= stats.num_query_tokens

    def teardown(self) -> None:
        for member in list(self.members.values()):
            self.end(member)
        if hasattr(self, "kv"):
            assert self.kv.pool.num_free == self.kv.pool.num_blocks
            self.the_books_agree()


TestSharing = SharingMachine.TestCase
TestSharing.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
