"""Whether the books of a target replica agree. Raises IntegrityError where they do not: a bug, whoever calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cluster.core.block_pool import IntegrityError
from cluster.core.kv_cache import KVCacheManager
from cluster.core.sequence import Sequence, SequenceStatus
from cluster.core.sequence_queue import SequenceQueue
from cluster.core.waiting_line import WaitingLine


def check_queues(sequences: Mapping[str, Sequence], waiting: WaitingLine, running: SequenceQueue) -> None:
    """Every sequence is in the one queue that its status names, and in order."""
    waiting.check_integrity()
    orders = [sequence.order for sequence in running]
    if orders != sorted(set(orders)):
        raise IntegrityError(f"the running sequences are out of order: {orders}")
    _check_members(sequences, waiting, is_running=False)
    _check_members(sequences, running, is_running=True)
    if len(waiting) + len(running) != len(sequences):
        raise IntegrityError("a sequence is in no queue, or in two")


def check_slots(sequences: Iterable[Sequence], kv: KVCacheManager) -> None:
    """Every sequence has slots for what it has computed, and none while it waits."""
    for sequence in sequences:
        num_slots = len(kv.block_table(sequence.request_id)) * kv.block_size
        if num_slots < sequence.num_computed_tokens:
            raise IntegrityError(f"{sequence.request_id} has computed more tokens than it has slots")
        if num_slots and sequence.status is not SequenceStatus.RUNNING:
            raise IntegrityError(f"{sequence.request_id} waits but holds KV")
    kv.check_integrity()


def _check_members(sequences: Mapping[str, Sequence], queue: Iterable[Sequence], is_running: bool) -> None:
    for sequence in queue:
        if sequences.get(sequence.request_id) is not sequence:
            raise IntegrityError(f"{sequence.request_id} is queued but unknown")
        if is_running != (sequence.status is SequenceStatus.RUNNING):
            raise IntegrityError(f"{sequence.request_id} is {sequence.status.value} but in the other queue")
