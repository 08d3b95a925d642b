"""What runs in the next step, and what its result commits."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.draft_length import DraftLengthController
from cluster.core.kv_cache import KVCacheManager
from cluster.core.step import ScheduledSequence, SchedulerOutput, SchedulerStats, StepOutput
from cluster.messages import Commit, DraftBlock, HoldMode, Refusal, Submit


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one target replica."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_queued: int
    vocab_size: int  # prompts and guesses outside it are refused
    eos_token_ids: frozenset[int] = frozenset()
    hold: HoldMode = HoldMode.BREAK_EVEN
    max_hold_s: float = 0.05


class Scheduler:
    """Owns every sequence of a target replica. Called from one thread; `now` is any monotonic clock, in seconds.

    The engine's loop: expire(now) → schedule(now) → run the model → apply(scheduled, output, now, step_s).
    submit, propose and abort may come at any moment, between schedule and apply too.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, draft_length: DraftLengthController) -> None:
        raise NotImplementedError

    @property
    def num_unfinished(self) -> int:
        """Sequences that are running or waiting."""
        raise NotImplementedError

    def submit(self, submit: Submit, now: float) -> Refusal | None:
        raise NotImplementedError

    def propose(self, block: DraftBlock, now: float) -> None:
        raise NotImplementedError

    def abort(self, request_id: str) -> Commit | None:
        """Forget a sequence at any moment and free its KV; its last, empty Commit, or None for an unknown id."""
        raise NotImplementedError

    def expire(self, now: float) -> list[Commit]:
        """Finish every sequence whose deadline has passed. Call before schedule."""
        raise NotImplementedError

    def schedule(self, now: float) -> SchedulerOutput:
        """Nothing scheduled and no wake_at: nothing to do until the next command."""
        raise NotImplementedError

    def apply(
        self, scheduled: tuple[ScheduledSequence, ...], step_output: StepOutput, now: float, step_s: float
    ) -> list[Commit]:
        """Raises ValueError for an output that does not fit; abort the step's sequences then."""
        raise NotImplementedError

    def stats(self) -> SchedulerStats:
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raise IntegrityError unless queues, block tables and block pool agree."""
        raise NotImplementedError
