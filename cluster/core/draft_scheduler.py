"""Which draft sessions run which rows in each step of a draft replica. Pure: time is passed in as monotonic seconds.

A step gives every session that has work its pending rows and, where a guess is owed, one sample. Those that sample may
go on in a chain of passes, a guess each, so that one step makes a block of K. No block waits for another's: the chain
ends with the first block that is complete, or as long as it is worth making. Commands are taken between steps, and a
chain ends when one comes; so a commit overtakes a draft that it makes useless, and a newcomer joins the next pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from cluster.core.draft_session import CommitOutcome, DraftSession
from cluster.core.draft_sessions import DraftSessions
from cluster.core.grammar import Grammars
from cluster.core.kv_cache import KVCacheManager
from cluster.core.step import ScheduledSequence, SchedulerOutput, SchedulerStats, StepOutput, StepStats
from cluster.messages.request import MAX_DRAFT_TOKENS
from cluster.messages.rounds import Close, Committed, DraftBlock, DraftCommand, DraftEvent, Open, Refusal, RefusalReason


@dataclass(frozen=True, slots=True)
class DraftSchedulerConfig:
    """The limits of a draft replica."""

    max_num_seqs: int  # sessions in one step
    max_num_batched_tokens: int  # rows in one step
    max_model_len: int
    max_sessions: int
    vocab_size: int  # ids at or above it cannot be read by the model
    eos_token_ids: frozenset[int] = frozenset()
    idle_after_s: float = 1.0  # a session without work for this long may be closed to make room

    @property
    def num_prompt_rows(self) -> int:
        """A session with more rows than this to run is still reading its prompt; with fewer, it drafts."""
        return min(MAX_DRAFT_TOKENS + 1, self.max_num_batched_tokens // 4)


class _Rows(NamedTuple):
    """What one session runs in a step."""

    session: DraftSession
    token_ids: tuple[int, ...]

    @property
    def is_last(self) -> bool:
        """Whether the session's last token is among them, whose row samples the next guess."""
        return self.session.num_computed_tokens + len(self.token_ids) == self.session.num_tokens


class DraftScheduler:
    """Owns the order of work in a draft replica. Called from one thread; commands come between apply and schedule."""

    def __init__(self, config: DraftSchedulerConfig, kv: KVCacheManager, grammars: Grammars | None = None) -> None:
        self.is_draining = False
        self._config = config
        self._grammars = grammars
        self._sessions = DraftSessions(kv, config.max_sessions, config.idle_after_s)
        self._events: list[DraftEvent] = []
        self._num_stale = 0

    @property
    def is_idle(self) -> bool:
        """Whether no session is open."""
        return len(self._sessions) == 0

    def take_events(self) -> list[DraftEvent]:
        """What happened since the last call: blocks, then sessions that had to be closed."""
        events, self._events = [*self._events, *self._sessions.take_refusals()], []
        return events

    def stats(self) -> SchedulerStats:
        """Occupancy: a session waits while it still reads its prompt, else it runs."""
        pool = self._sessions.kv.pool
        limit = self._config.num_prompt_rows
        num_waiting = sum(session.num_pending_tokens > limit for session in self._sessions)
        return SchedulerStats(
            num_running=len(self._sessions) - num_waiting,
            num_waiting=num_waiting,
            num_used_blocks=pool.num_used,
            num_total_blocks=pool.num_blocks,
            peak_used_blocks=pool.peak_used,
            num_preemptions=self._sessions.num_evicted,
            num_stale_blocks=self._num_stale,
            prefix_cache=self._sessions.kv.prefix_stats(),
        )

    # --- commands ----------------------------------------------------------------------------------------------------

    def handle(self, command: DraftCommand, now: float) -> None:
        """Apply one command; what it leads to comes out of take_events()."""
        match command:
            case Open():
                self._open(command, now)
            case Committed():
                self._commit(command, now)
            case Close():
                self._sessions.close(command.request_id)

    def refusal_of(self, command: DraftCommand, reason: RefusalReason, message: str) -> Refusal | None:
        """The answer to a command that is not taken; closing needs none."""
        return None if isinstance(command, Close) else Refusal(command.request_id, reason, message, command.epoch)

    def refuse(self, command: DraftCommand, reason: RefusalReason, message: str) -> None:
        """Answer a command that could not be applied, and close its session."""
        self._sessions.close(command.request_id)
        refusal = self.refusal_of(command, reason, message)
        if refusal is not None:
            self._events.append(refusal)

    def refuse_all(self, reason: RefusalReason, message: str) -> None:
        """Close every session."""
        for session in list(self._sessions):
            self._sessions.refuse(session, reason, message)

    def _open(self, message: Open, now: float) -> None:
        known = self._sessions.get(message.request_id)
        if known is not None and known.epoch >= message.epoch:
            self._num_stale += 1
            return
        flaw = self._flaw_of(message)
        if flaw is not None:
            self.refuse(message, *flaw)
            return
        self._sessions.close(message.request_id)
        config = self._config
        session = DraftSession(message, config.max_model_len, config.eos_token_ids, now, self._grammars)
        shortage = self._sessions.admit(session, now)
        if shortage is not None:
            self.refuse(message, RefusalReason.QUEUE_FULL, shortage)
            return
        self._ship(session, now)

    def _flaw_of(self, message: Open) -> tuple[RefusalReason, str] | None:
        """Why this replica can never draft for a request."""
        num_tokens, limit, kv = len(message.token_ids), self._config.max_model_len, self._sessions.kv
        if self.is_draining:
            return RefusalReason.DRAINING, "the draft replica is draining"
        if num_tokens == 0:
            return RefusalReason.UNSUPPORTED, "token_ids: at least one is needed"
        if not self._can_read(message.token_ids):
            return RefusalReason.UNSUPPORTED, f"token_ids: not all below {self._config.vocab_size}"
        if num_tokens > limit:
            return RefusalReason.TOO_LONG, f"{num_tokens} tokens, the draft model reads {limit}"
        if kv.num_blocks_for(num_tokens) > kv.pool.num_blocks:
            return RefusalReason.TOO_LONG, f"{num_tokens} tokens need more KV than the replica has"
        return None

    def _commit(self, message: Committed, now: float) -> None:
        session = self._sessions.get(message.request_id)
        if session is None:
            self.refuse(message, RefusalReason.INTERNAL, "no such draft session")
            return
        outcome = session.commit(message, now) if self._can_read(message.token_ids) else CommitOutcome.GAP
        match outcome:
            case CommitOutcome.STALE:
                self._num_stale += 1
            case CommitOutcome.GAP:
                have = f"epoch {session.epoch} up to {session.committed_len}"
                text = f"gap: have {have}, cannot follow epoch {message.epoch} at {message.base_len}"
                self.refuse(message, RefusalReason.INTERNAL, text)
            case CommitOutcome.APPLIED:
                self._follow(session, now)

    def _follow(self, session: DraftSession, now: float) -> None:
        """Give back the KV of forgotten guesses, and ship those that are still right."""
        limit = self._config.max_model_len
        if session.committed_len > limit:
            self._sessions.refuse(session, RefusalReason.TOO_LONG, f"the draft model reads {limit} tokens")
            return
        self._sessions.kv.truncate(session.request_id, session.num_tokens)
        self._sessions.prefixes.publish(session)
        self._ship(session, now)

    def _can_read(self, token_ids: tuple[int, ...]) -> bool:
        return not token_ids or (max(token_ids) < self._config.vocab_size and min(token_ids) >= 0)

    # --- steps -------------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput:
        """The rows of the next step; empty when no session has work. May close sessions for want of KV."""
        config = self._config
        budget, max_seqs = config.max_num_batched_tokens, config.max_num_seqs
        short, long = self._by_length()
        # Drafting goes first, but leaves a quarter of the rows and one place to prompts, so that reading never stops.
        chosen: dict[str, _Rows] = {}
        self._fill(chosen, short, budget - budget // 4 if long else budget, max(1, max_seqs - bool(long)), now)
        self._fill(chosen, self._sessions.prefixes.ready(long), budget, max_seqs, now)
        num_chained = self._num_chained(chosen.values())
        return SchedulerOutput(tuple(map(self._scheduled, chosen.values())), num_chained=num_chained)

    def apply(self, step: SchedulerOutput, output: StepOutput, now: float, step_s: float) -> StepStats:
        """Take in what a step computed and sampled, and ship the blocks that are now complete."""
        for item in step.scheduled:
            self._advance(item, output, now)
        num_sampled = [len(sampled.token_ids) for sampled in output.samples.values()]
        num_guesses = sum(num_sampled)
        return StepStats(
            duration_s=step_s,
            num_sequences=len(step.scheduled),
            num_scheduled_tokens=step.num_scheduled_tokens + num_guesses - len(output.samples),
            num_draft_tokens=0,
            num_accepted_tokens=0,
            num_emitted_tokens=num_guesses,
            num_verified_sequences=0,
            accepted_per_position=(),
            scheduler=self.stats(),
            num_passes=max(num_sampled, default=1),
        )

    def _advance(self, item: ScheduledSequence, output: StepOutput, now: float) -> None:
        session = self._sessions.get(item.request_id)
        if session is None:
            raise ValueError(f"request {item.request_id} was closed while its step ran")
        session.advance(len(item.token_ids))
        if item.request_id in output.failed:
            self._sessions.refuse(session, RefusalReason.INTERNAL, output.failed[item.request_id])
            return
        self._sessions.prefixes.publish(session)
        if item.request_id in output.stuck:
            session.get_stuck()
            self._ship(session, now)
        elif item.num_samples:
            session.add_guesses(output.samples[item.request_id])
            self._sessions.kv.truncate(session.request_id, session.num_tokens)  # what a chain that ended early left
            self._ship(session, now)

    def fail(self, step: SchedulerOutput, message: str) -> None:
        """Close the sessions of a step that did not run: what their KV holds is unknown."""
        for item in step.scheduled:
            session = self._sessions.get(item.request_id)
            if session is not None:
                self._sessions.refuse(session, RefusalReason.INTERNAL, message)

    def _by_length(self) -> tuple[list[DraftSession], list[DraftSession]]:
        """Sessions with work, longest waiting first: those that draft, and those that still read a prompt."""
        ready = [(session, rows) for session in self._sessions if (rows := session.num_pending_tokens) > 0]
        ready.sort(key=lambda item: item[0].last_used)
        limit = self._config.num_prompt_rows
        return [item for item, rows in ready if rows <= limit], [item for item, rows in ready if rows > limit]

    def _fill(
        self,
        chosen: dict[str, _Rows],
        sessions: list[DraftSession],
        budget: int,
        max_seqs: int,
        now: float,
    ) -> None:
        """Add rows of `sessions` to those of a step until it holds `budget` rows or `max_seqs` sessions."""
        num_left = budget - sum(len(rows.token_ids) for rows in chosen.values())
        for session in sessions:
            if num_left <= 0 or len(chosen) >= max_seqs:
                break
            rows = session.pending_rows(num_left)  # none if all that was pending has come out of the prefix cache
            if rows and self._sessions.make_room(session, session.num_computed_tokens + len(rows), chosen, now):
                chosen[session.request_id] = _Rows(session, rows)
                num_left -= len(rows)

    def _num_chained(self, chosen: Iterable[_Rows]) -> int:
        """Guesses that all who sample can add to their first one, with slots for them; nobody gives way for a chain."""
        drafting = [rows.session for rows in chosen if rows.is_last]
        num_chained = min((session.num_free_guesses for session in drafting), default=0) - 1
        if num_chained <= 0:
            return 0
        kv = self._sessions.kv
        has_room = all(kv.allocate_slots(one.request_id, one.num_tokens + num_chained) for one in drafting)
        return num_chained if has_room else 0

    def _scheduled(self, rows: _Rows) -> ScheduledSequence:
        session, is_last = rows.session, rows.is_last
        return ScheduledSequence(
            request_id=session.request_id,
            token_ids=rows.token_ids,
            start=session.num_computed_tokens,
            block_table=self._sessions.kv.block_table(session.request_id),
            num_samples=int(is_last),
            sampling=session.sampling,
            min_logprob=session.min_logprob,
            history=session.history() if is_last else None,
            token_masks=session.token_mask() if is_last else None,
        )

    def _ship(self, session: DraftSession, now: float) -> None:
        if session.is_due:
            block: DraftBlock = session.take_block(now)
            self._events.append(block)
