"""What sequences of one replica spare each other: the computing of prefixes that they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from cluster.core.kv_cache import KVCacheManager
from cluster.core.prefix_cache import TokenChain


class SharesPrefix(Protocol):
    """A sequence or a draft session."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def chain(self) -> TokenChain:
        """Of its committed tokens."""

    def skip_to(self, num_tokens: int) -> None:
        """Its first `num_tokens` tokens have KV that it did not compute."""


SharerT = TypeVar("SharerT", bound=SharesPrefix)


class PrefixSharing:
    """Owns when a prefix is taken from the cache, and when one is put there."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def admit(self, sequence: SharesPrefix, num_spare: int = 0) -> bool:
        """Give it slots for all of its tokens and its longest cached prefix, if `num_spare` blocks stay free."""
        num_tokens = self._kv.admit(sequence.request_id, sequence.chain, num_spare)
        if num_tokens is None:
            return False
        sequence.skip_to(num_tokens)
        return True

    def publish(self, sequence: SharesPrefix) -> None:
        """After a step or a commit: its full blocks of committed tokens that have KV are there for others."""
        num_tokens = min(len(sequence.chain), sequence.num_computed_tokens)
        self._kv.publish(sequence.request_id, num_tokens)

    def ready(self, sequences: Sequence[SharerT]) -> list[SharerT]:
        """Those that are to prefill in the next step, in order.

        All first catch up with what others have published. One whose next block is being computed in this very step
        by one before it sits the step out: it will find the block afterwards, or compute it if the other has gone. The
        first of them always runs, so a wait ends with the prefix that they share.
        """
        under_way: set[bytes] = set()
        ready = []
        for sequence in sequences:
            self._catch_up(sequence)
            block = self._kv.next_block(sequence.chain, sequence.num_computed_tokens)
            if block is None or block.key not in under_way:
                ready.append(sequence)
            if block is not None:
                under_way.add(block.key)
        return ready

    def _catch_up(self, sequence: SharesPrefix) -> None:
        num_tokens = self._kv.catch_up(sequence.request_id, sequence.num_computed_tokens)
        if num_tokens > sequence.num_computed_tokens:
            sequence.skip_to(num_tokens)
