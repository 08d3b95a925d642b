"""One request inside a target replica."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cluster.core.draft_length import DraftLengthState
from cluster.core.grammar import GrammarError, GrammarGuide
from cluster.core.logit_history import LogitHistory
from cluster.core.prefix_cache import TokenChain
from cluster.core.sampling import is_greedy
from cluster.messages.answer import FinishReason
from cluster.messages.rounds import DraftBlock, StepTimings, Submit

_MAX_REMEMBERED_COMMITS = 8  # a block later than that teaches nothing


class SequenceStatus(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"  # holds no KV, has not run yet
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again: lost its KV to others, keeps its tokens
    FINISHED = "finished"


class HoldOutcome(Enum):
    """What came of a sequence's wait for its block."""

    ARRIVED = "arrived"  # held, and the block came
    DECLINED = "declined"  # held, and word came that there will be no block
    EXPIRED = "expired"  # held in vain
    NOT_WORTH = "not_worth"  # not held: decoding plainly was the better bet


@dataclass(slots=True)
class BlockWait:
    """The wait for the block that the last commit asked for; it has one outcome."""

    num_draft_tokens: int
    asked_at: float
    outcome: HoldOutcome | None = None  # None: still open


@dataclass(frozen=True, slots=True)
class RoundTime:
    """How long a block took from the commit that asked for it, and how much of that its drafter worked; seconds."""

    round_trip_s: float = 0.0
    draft_time_s: float = 0.0


NO_ROUND = RoundTime()


def guesses_left(block: DraftBlock, token_ids: list[int]) -> tuple[int, ...]:
    """The guesses of a block that are still ahead of the committed tokens; empty if any of the others was wrong.

    token_ids   ............ committed_len ............ len(token_ids)
    block                    | must equal token_ids     | guesses left |
    """
    offset = len(token_ids) - block.committed_len
    if not 0 <= offset < len(block.token_ids) or block.committed_len < 0:
        return ()
    if offset and tuple(token_ids[block.committed_len :]) != block.token_ids[:offset]:
        return ()
    return block.token_ids[offset:]


@dataclass(slots=True, eq=False)
class Sequence:
    """Owns one request's tokens and progress. Mutable; only the scheduler changes it.

    token_ids   | prompt | output ......................... |
    KV valid    | num_computed_tokens .... |                 (num_tokens - 1 while decoding)
    """

    request: Submit
    order: tuple[int, int]  # (priority, arrival number)
    arrived_at: float
    max_num_tokens: int  # prompt and output: the request's max_tokens or the model's context, whichever ends first
    stop_token_ids: frozenset[int]
    draft_length: DraftLengthState
    token_ids: list[int]
    chain: TokenChain = field(init=False)
    history: LogitHistory | None = None  # only where the sampling parameters depend on it
    guide: GrammarGuide | None = None  # only with a grammar
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of them, tokens that were never computed for it
    num_lost_tokens: int = 0  # were computed or cached when it was preempted
    in_step: bool = False  # scheduled, not applied yet
    pending: DraftBlock | None = None  # the newest block whose guesses fit the committed tokens
    wait: BlockWait | None = None
    draft_is_late: bool = False  # a hold expired and no block has come since
    has_asked: bool = False  # with the commit before this one
    asked_at: dict[int, float] = field(default_factory=dict)  # committed_len -> when its commit asked for a block
    first_scheduled_at: float | None = None
    held_since: float | None = None  # kept out of every step since
    held_s: float = 0.0  # how long the hold before the step under way lasted
    round_time: RoundTime = NO_ROUND  # of the block that came since the last commit
    has_committed: bool = False
    is_aged: bool = False  # started before its turn, since it had waited longest: gives way to none but such
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.chain = TokenChain(self.request.tenant, self.token_ids)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def arrival(self) -> int:
        return self.order[1]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        """More to compute than the one row of a plain decode."""
        return self.num_computed_tokens == 0 or self.num_uncomputed_tokens > 1

    @property
    def num_remaining_tokens(self) -> int:
        return self.max_num_tokens - len(self.token_ids)

    @property
    def speculates(self) -> bool:
        """Whether guesses for it may come."""
        return self.draft_length.max_draft_tokens > 0

    @property
    def shows_chances(self) -> bool:
        """Whether a token's probability in a draft's logits says how likely it is to be accepted.

        Not where tokens are drawn: two that draw alike agree on an unlikely token too. And not where penalties or a
        grammar decide what the logits do not know of.
        """
        return is_greedy(self.request.sampling) and self.history is None and self.guide is None

    def guesses(self) -> tuple[int, ...]:
        """Guesses to verify next: what the last commit asked for, which leaves room for the target's own token."""
        if self.pending is None:
            return ()
        guesses = guesses_left(self.pending, self.token_ids)[: self.draft_length.longest_len]
        return guesses if self.guide is None else self.guide.legal_prefix(guesses)

    def enter_step(self, now: float) -> None:
        """It is scheduled: the hold before this step, if any, is over."""
        self.in_step = True
        if self.first_scheduled_at is None:
            self.first_scheduled_at = now
        self.held_s = 0.0 if self.held_since is None else now - self.held_since
        self.held_since = None

    def hold(self, now: float) -> None:
        """It is kept out of the step that is due `now`."""
        if self.held_since is None:
            self.held_since = now

    def open_wait(self) -> BlockWait | None:
        """The wait for a block, while there are neither guesses nor an outcome."""
        return self.wait if self.wait is not None and self.wait.outcome is None and not self.guesses() else None

    def cut(self, emitted: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """The emitted tokens up to and including the one that ends the sequence, and why it ends there."""
        for count, token_id in enumerate(emitted, start=1):
            if token_id in self.stop_token_ids:
                return emitted[:count], FinishReason.STOP
            if count == self.num_remaining_tokens:
                return emitted[:count], FinishReason.LENGTH
        return emitted, None

    def append(self, token_ids: tuple[int, ...]) -> None:
        """Commit sampled tokens: KV is valid for all but the last."""
        self.token_ids.extend(token_ids)
        if self.history is not None:
            self.history.append(token_ids)
        self.num_computed_tokens = len(self.token_ids) - 1

    def skip_to(self, num_tokens: int) -> None:
        """KV for the first `num_tokens` tokens was cached. What it had itself before a preemption is no saving."""
        self.num_cached_tokens += max(0, num_tokens - max(self.num_computed_tokens, self.num_lost_tokens))
        self.num_computed_tokens = num_tokens

    def cached_prompt_tokens(self) -> int:
        """What its first commit reports, in whichever replica that is; 0 for any other commit."""
        if self.has_committed or self.request.output_token_ids:
            return 0
        return min(self.num_cached_tokens, len(self.request.prompt_token_ids))

    def follow_grammar(self, token_ids: tuple[int, ...], reason: FinishReason | None) -> FinishReason | None:
        """Move the grammar on by what is committed; why the sequence ends, if not for `reason`, or None."""
        if self.guide is None or reason is FinishReason.STOP:
            return reason
        try:
            self.guide.append(token_ids)
        except GrammarError:
            return FinishReason.ERROR
        return FinishReason.STOP if self.guide.is_complete else reason

    def timings(self, step_s: float) -> StepTimings:
        """Of the commit that is being made; the time in the queue belongs to the first."""
        queue_s = 0.0
        if not self.has_committed and self.first_scheduled_at is not None:
            queue_s = self.first_scheduled_at - self.arrived_at
        self.has_committed = True
        round_time, self.round_time = self.round_time, NO_ROUND
        return StepTimings(queue_s, step_s, self.held_s, round_time.round_trip_s, round_time.draft_time_s)

    def ask_for_block(self, num_draft_tokens: int, now: float) -> None:
        """The commit at `now` asks for so many guesses; 0 asks for none.

        The first block also waits for the drafter to read the prompt, or what was committed while none was asked for:
        it says nothing about the next ones' times.
        """
        self.wait = None
        if num_draft_tokens == 0:
            self.has_asked = False
            return
        self.wait = BlockWait(num_draft_tokens, now)
        if self.has_asked:
            self.asked_at[self.num_tokens] = now
        self.has_asked = True
        if len(self.asked_at) > _MAX_REMEMBERED_COMMITS:
            del self.asked_at[next(iter(self.asked_at))]

    def reset_kv(self) -> None:
        """Its KV is gone: everything must be computed again. Tokens and guesses stay."""
        self.num_lost_tokens = max(self.num_lost_tokens, self.num_computed_tokens)
        self.num_computed_tokens = 0
        self.wait = self.held_since = None
        self.status = SequenceStatus.PREEMPTED
