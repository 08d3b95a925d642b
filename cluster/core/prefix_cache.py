"""Which blocks hold the KV of which tokens, so that what begins like something earlier need not be computed again.

    token_ids   | block 0       | block 1        | ... | a rest that fills no block: never shared |
    keys        H(root, block 0) → H(key 0, block 1) → ...

A key stands for a whole prefix: each is a hash of its block's tokens, keyed with the key before it. The first is keyed
with the tenant's root, which no token can produce, so tenants share nothing and cannot even probe each other's blocks.
A hash only finds a block; whether it is the right one is decided by comparing tokens.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

_KEY_BYTES = 32


class IntegrityError(RuntimeError):
    """The books of a block pool, of its tables or of its cache do not add up: a bug, never a caller's mistake."""


def root_key(tenant: str) -> bytes:
    """What the keys of a tenant's prefixes start from. Hashed without a key, as no block's tokens are."""
    return blake2b(tenant.encode(), digest_size=_KEY_BYTES, person=b"paceline-tenant").digest()


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a full block holds the KV of: these tokens, after those that `parent` stands for."""

    tenant: str
    parent: bytes  # the key of the block before, or the tenant's root
    token_ids: bytes  # int32 [block_size]
    key: bytes


class TokenChain:
    """Owns the keys of one sequence's full blocks, made when they are asked for.

    `token_ids` is the sequence's own list of committed tokens: it may grow at its end and change nowhere else.
    """

    __slots__ = ("_keys", "tenant", "token_ids")

    def __init__(self, tenant: str, token_ids: Sequence[int]) -> None:
        self.tenant = tenant
        self.token_ids = token_ids
        self._keys: list[bytes] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    def block(self, index: int, block_size: int) -> BlockContent:
        """The content of a full block. `block_size` is the same in every call."""
        while len(self._keys) <= index:
            number = len(self._keys)
            digest = blake2b(self._pack(number, block_size), digest_size=_KEY_BYTES, key=self._parent(number))
            self._keys.append(digest.digest())
        return BlockContent(self.tenant, self._parent(index), self._pack(index, block_size), self._keys[index])

    def _parent(self, index: int) -> bytes:
        return self._keys[index - 1] if index else root_key(self.tenant)

    def _pack(self, index: int, block_size: int) -> bytes:
        return array("i", self.token_ids[index * block_size : (index + 1) * block_size]).tobytes()


class PrefixCache:
    """Owns the contents of cached blocks, and the order in which those that nobody holds give way.

    A table that holds a cached block holds those before it in the chain too, and lets go of its last one first. So of
    the idle blocks a longer prefix always gives way before a shorter one, and no cached block loses its parent.
    """

    def __init__(self) -> None:
        self._contents: dict[int, BlockContent] = {}
        self._block_ids: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, held by nobody; the least recently used first

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._contents

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def find(self, content: BlockContent) -> int | None:
        """The block that holds exactly this."""
        block_id = self._block_ids.get(content.key)
        return block_id if block_id is not None and self._contents[block_id] == content else None

    def add(self, block_id: int, content: BlockContent) -> bool:
        """Make a held block known by its content; False if something else goes by the same key."""
        if content.key in self._block_ids:
            return False
        self._contents[block_id] = content
        self._block_ids[content.key] = block_id
        return True

    def rest(self, block_id: int) -> None:
        """Nobody holds a cached block any more."""
        self._idle[block_id] = None

    def wake(self, block_id: int) -> None:
        """Somebody holds an idle block again. Raises IntegrityError for any other."""
        if block_id not in self._idle:
            raise IntegrityError(f"block {block_id} is free and cannot be shared")
        del self._idle[block_id]

    def evict(self) -> int:
        """Forget the idle block that has not been used for the longest, and give it away."""
        block_id, _ = self._idle.popitem(last=False)
        del self._block_ids[self._contents.pop(block_id).key]
        return block_id

    def check_integrity(self, is_held: Callable[[int], bool]) -> None:
        """Raise IntegrityError unless contents, keys and the order of eviction agree."""
        if {content.key: block_id for block_id, content in self._contents.items()} != self._block_ids:
            raise IntegrityError("the prefix cache's keys and contents differ")
        ages = {block_id: age for age, block_id in enumerate(self._idle)}
        for block_id, content in self._contents.items():
            if is_held(block_id) == (block_id in ages):
                raise IntegrityError(f"cached block {block_id} is held: {is_held(block_id)}")
            parent = self._block_ids.get(content.parent)
            if parent is None and content.parent != root_key(content.tenant):
                raise IntegrityError(f"cached block {block_id} has lost its parent")
            if parent in ages and ages[parent] < ages.get(block_id, len(ages)):
                raise IntegrityError(f"cached block {block_id} would outlive its parent {parent}")
