"""What runs in the next step, and what its result commits.

There is no prefill phase and no decode phase: a sequence's work is the tokens that it has not computed, plus guesses.
"""

from __future__ import annotations

from itertools import count

from cluster.core.acceptance import accept_equal
from cluster.core.admission import SchedulerConfig, make_sequence, refuse, refuse_duplicate, refuse_overload
from cluster.core.deadlines import Deadlines
from cluster.core.draft_length import NOTHING, DraftAsk, DraftLengthController
from cluster.core.grammar import TokenMatcher
from cluster.core.hold import Hold, HoldPolicy
from cluster.core.integrity import check_queues, check_slots
from cluster.core.kv_cache import KVCacheManager
from cluster.core.prefill_budget import PrefillBudget, is_chunk
from cluster.core.prefix_sharing import PrefixSharing
from cluster.core.proposals import Proposals
from cluster.core.sequence import HoldOutcome, Sequence, SequenceStatus
from cluster.core.sequence_queue import SequenceQueue
from cluster.core.step import SampledTokens, ScheduledSequence, SchedulerOutput, SchedulerStats, StepOutput
from cluster.core.step_plan import StepPlan
from cluster.core.tenant_shares import TenantShares
from cluster.core.waiting_line import WaitingLine, in_order_of_keeping, in_order_of_service
from cluster.messages.answer import FinishReason
from cluster.messages.rounds import Commit, DraftBlock, Refusal, SetDraftLimit, Submit

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """Owns every sequence of a target replica. Called from one thread; `now` is any monotonic clock, in seconds.

    The engine's loop: expire(now) → schedule(now) → run the model → apply(scheduled, output, now, step_s).
    submit, propose, set_draft_limit and abort may come at any moment, between schedule and apply too.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, draft_length: DraftLengthController) -> None:
        self.config = config
        self._kv = kv
        self._prefixes = PrefixSharing(kv)
        self._draft_length = draft_length
        self._hold = HoldPolicy(config.hold, config.max_hold_s, draft_length)
        self._sequences: dict[str, Sequence] = {}
        self._shares = TenantShares(max_lead=4 * config.max_num_batched_tokens)
        self._waiting = WaitingLine(self._shares)
        self._running = SequenceQueue()
        self._prefill = PrefillBudget(config.prefill_stretch, draft_length)
        self._proposals = Proposals(config.vocab_size, self._hold, draft_length)
        self._deadlines = Deadlines()
        self._arrivals = count()
        self._num_preemptions = 0

    @property
    def num_unfinished(self) -> int:
        """Sequences that are running or waiting."""
        return len(self._sequences)

    # --- commands ---

    def submit(self, submit: Submit, now: float, matcher: TokenMatcher | None = None) -> Refusal | None:
        """Queue a request; or say why not: a duplicate, malformed, too long for the model or the pool, no room.

        `matcher`: at the start of an output in the request's grammar, if it has one. Raises GrammarError if the output
        that the request comes with does not follow it.
        """
        if submit.request_id in self._sequences:
            return refuse_duplicate(submit)
        refusal = refuse(submit, self.config, self._kv)
        if refusal is not None:
            return refusal
        if len(self._sequences) >= self.config.max_num_seqs + self.config.max_queued:
            return refuse_overload(submit, len(self._waiting))
        sequence = make_sequence(submit, self.config, next(self._arrivals), now, matcher)
        self._sequences[submit.request_id] = sequence
        self._shares.enter(submit.tenant)
        self._waiting.add(sequence)
        if submit.deadline_s is not None:
            self._deadlines.add(sequence, now + submit.deadline_s)
        return None

    def propose(self, block: DraftBlock, now: float) -> None:
        """Take a block's guesses as far as they fit what is committed; one that does not fit is dropped and counted."""
        sequence = self._sequences.get(block.request_id)
        if sequence is not None:
            self._proposals.take(sequence, block, now)

    def set_draft_limit(self, command: SetDraftLimit) -> None:
        """Bound what a request's next commits ask for; 0 also ends its wait for a block. Unknown ids are ignored."""
        sequence = self._sequences.get(command.request_id)
        if sequence is not None:
            self._proposals.set_limit(sequence, command.max_draft_tokens)

    def abort(self, request_id: str) -> Commit | None:
        """Forget a sequence at any moment and free its KV; its last, empty Commit, or None for an unknown id."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._end(sequence, FinishReason.CANCELLED)

    def expire(self, now: float) -> list[Commit]:
        """Finish every sequence whose deadline has passed. Call before schedule."""
        expired = self._deadlines.take_expired(self._sequences, now)
        return [self._end(sequence, FinishReason.DEADLINE) for sequence in expired]

    def _end(self, sequence: Sequence, reason: FinishReason) -> Commit:
        self._forget(sequence, reason)
        return Commit(sequence.request_id, sequence.num_tokens, (), finish_reason=reason)

    def _forget(self, sequence: Sequence, reason: FinishReason) -> None:
        (self._running if sequence.status is SequenceStatus.RUNNING else self._waiting).remove(sequence)
        sequence.status, sequence.finish_reason, sequence.in_step = SequenceStatus.FINISHED, reason, False
        del self._sequences[sequence.request_id]
        self._shares.leave(sequence.request.tenant)
        self._kv.free(sequence.request_id)

    # --- planning a step ---

    def schedule(self, now: float) -> SchedulerOutput:
        """Share one token budget: a row for every decoding sequence, then guesses, then prefill, in order of service.

        Guesses get at most half of what prefill could use, prefill what its allowance permits of the rest. Nothing
        scheduled and no wake_at means that there is nothing to do until the next command.
        """
        self._admit()
        if not len(self._running):
            self._draft_length.tactics.rest()  # what it waits for from now on is no step
        decoding = [sequence for sequence in self._running if not sequence.is_prefilling]
        hold = self._hold.decide(decoding, self._must_run(decoding), now)
        plan = StepPlan(self.config.max_num_batched_tokens, self._kv)
        self._add_decodes(plan, hold)
        prefilling = [sequence for sequence in self._running if sequence.is_prefilling]
        plan.add_guesses(plan.num_rows_left // 2 if prefilling else plan.num_rows_left)
        allowance = self._prefill.allowance(plan.num_planned_rows, len(self._running) - len(prefilling))
        plan.add_prefills(self._prefixes.ready(in_order_of_service(prefilling, self._shares)), allowance)
        return plan.freeze(now, self._wake_at(hold))

    def _must_run(self, decoding: list[Sequence]) -> bool:
        """Whether anyone has work that no guess will ever speed up, so that the step must not wait for guesses."""
        return len(decoding) < len(self._running) or any(not sequence.speculates for sequence in decoding)

    def _wake_at(self, hold: Hold) -> float | None:
        """The end of the hold, or a deadline before that."""
        deadline = self._deadlines.earliest
        return hold.wake_at if hold.wake_at is None or deadline is None else min(hold.wake_at, deadline)

    def _add_decodes(self, plan: StepPlan, hold: Hold) -> None:
        """A row for each that decodes and is not held, and a slot for it, at the cost of those that give way last.

        The first always gets its slots: a single sequence fits into the pool, or it would have been refused.
        Guesses are planned later and hold no blocks between steps, so lookahead never costs anyone their KV.
        """
        running = in_order_of_keeping(self._running, self._shares)
        for sequence in tuple(running):
            may_run = not sequence.is_prefilling and sequence not in hold.sequences  # a preempted one has to prefill
            if may_run and self._make_room(sequence, running):
                plan.add_decode(sequence)

    def _make_room(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """A slot for every committed token; False if the sequence had to give way itself."""
        while not self._kv.allocate_slots(sequence.request_id, sequence.num_tokens):
            victim = running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._kv.free(sequence.request_id)
        self._running.remove(sequence)
        sequence.reset_kv()
        self._waiting.add(sequence)
        self._num_preemptions += 1

    def _admit(self) -> None:
        """Start waiting sequences in order, each with KV for all that it has to compute.

        One spare block per running sequence stays free: this step at least, the newcomer will not be preempted.
        """
        while len(self._waiting) and len(self._running) < self.config.max_running:
            sequence = self._waiting.first
            if not self._prefixes.admit(sequence, num_spare=len(self._running)):
                return
            self._waiting.start(sequence)
            sequence.status = SequenceStatus.RUNNING
            self._running.add(sequence)

    # --- committing a step ---

    def apply(
        self, scheduled: tuple[ScheduledSequence, ...], step_output: StepOutput, now: float, step_s: float
    ) -> list[Commit]:
        """Commit what the step computed and sampled; sequences aborted meanwhile are skipped.

        Raises ValueError for an output that does not fit what was scheduled: abort the step's sequences then.
        """
        self._prefill.observe(scheduled, step_s)
        self._observe_tactic(scheduled, now)
        commits = []
        for item in scheduled:
            sequence = self._sequences.get(item.request_id)
            if sequence is None or not sequence.in_step:
                continue
            sequence.in_step = False
            sequence.num_computed_tokens += len(item.token_ids) - item.num_draft_tokens
            if item.num_samples:
                commits.append(self._commit(sequence, item, _samples(item, step_output), now, step_s))
            else:
                self._prefixes.publish(sequence)
        return commits

    def _observe_tactic(self, scheduled: tuple[ScheduledSequence, ...], now: float) -> None:
        """What the step comes to under the pool's tactic, in expected tokens.

        They vary less than those accepted, and do not depend on whose requests happened to be in a trial.
        """
        tactics = self._draft_length.tactics
        if not tactics.has_choice:
            return
        if any(is_chunk(item) for item in scheduled) or not any(running.speculates for running in self._running):
            tactics.skip(len(self._running))
            return
        expected = self._draft_length.expected_of_pool
        tactics.observe(len(self._running), sum(expected(item.num_draft_tokens) for item in scheduled), now)

    def _commit(
        self, sequence: Sequence, item: ScheduledSequence, sampled: SampledTokens, now: float, step_s: float
    ) -> Commit:
        num_known = len(item.token_ids) - item.num_draft_tokens
        accepted = accept_equal(item.token_ids[num_known:], sampled.token_ids)
        if item.num_draft_tokens:
            self._draft_length.observe_acceptance(sequence.draft_length, item.num_draft_tokens, accepted.num_accepted)
        token_ids, finish_reason = sequence.cut(accepted.emitted)
        finish_reason = sequence.follow_grammar(token_ids, finish_reason)
        num_cached_tokens = sequence.cached_prompt_tokens()
        base_len, timings = sequence.num_tokens, sequence.timings(step_s)
        sequence.append(token_ids)
        self._shares.charge(sequence.request.tenant, len(token_ids))
        self._prefixes.publish(sequence)
        if finish_reason is None:
            ask = self._go_on(sequence, item, now)
        else:
            ask = NOTHING
            self._forget(sequence, finish_reason)
        return Commit(
            request_id=sequence.request_id,
            base_len=base_len,
            token_ids=token_ids,
            next_draft_len=ask.draft_len,
            longest_draft_len=ask.longest_len,
            min_confidence=ask.min_confidence,
            num_draft_tokens=item.num_draft_tokens,
            num_accepted_tokens=min(accepted.num_accepted, len(token_ids)),
            finish_reason=finish_reason,
            logprobs=None if sampled.logprobs is None else sampled.logprobs[: len(token_ids)],
            timings=timings,
            num_cached_tokens=num_cached_tokens,
        )

    def _go_on(self, sequence: Sequence, item: ScheduledSequence, now: float) -> DraftAsk:
        """Forget the rejected guesses' KV, keep the guesses that still fit, and ask for the next ones."""
        self._kv.truncate(sequence.request_id, sequence.num_computed_tokens)
        self._proposals.drop_if_stale(sequence, was_verified=item.num_draft_tokens > 0)
        ask = self._draft_length.next_ask(
            sequence.draft_length, sequence.num_remaining_tokens, len(self._running), sequence.shows_chances
        )
        sequence.ask_for_block(ask.draft_len, now)
        return ask

    # --- books ---

    def stats(self) -> SchedulerStats:
        pool = self._kv.pool
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_used_blocks=pool.num_used,
            num_total_blocks=pool.num_blocks,
            peak_used_blocks=pool.peak_used,
            num_preemptions=self._num_preemptions,
            num_stale_blocks=self._proposals.num_stale,
            holds={outcome.value: self._hold.outcomes[outcome] for outcome in HoldOutcome},
            tactics={tactic.value: number for tactic, number in self._draft_length.tactics.num_steps.items()},
            prefix_cache=self._kv.prefix_stats(),
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless queues, block tables and block pool agree."""
        check_queues(self._sequences, self._waiting, self._running)
        check_slots(self._sequences.values(), self._kv)


def _samples(item: ScheduledSequence, step_output: StepOutput) -> SampledTokens:
    sampled = step_output.samples.get(item.request_id)
    if sampled is None:
        raise ValueError(f"the step sampled nothing for {item.request_id}")
    return sampled
