"""One request on its way through the pools: carries out what its speculation session decides.

Everything here runs in stream callbacks on the event loop. What a pool waits for is sent in the very call that brought
the frame; text for the client is made afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from cluster.control.policy import Decision, Reason
from cluster.core.speculation import (
    Action,
    CloseDraft,
    Dropped,
    Emit,
    Fallback,
    FallbackCause,
    OpenDraft,
    Propose,
    RoundDone,
    SpeculationSession,
    ToDraft,
)
from cluster.messages.answer import ErrorKind, FinishReason, RequestError
from cluster.messages.request import Drafter, GenerateRequest
from cluster.messages.rounds import Commit, DraftBlock, DraftEvent, Refusal, SetDraftLimit, Submit, TargetEvent
from cluster.router.delivery import Delivery
from cluster.router.draft_link import DraftLink
from cluster.router.observer import (
    BlockVerified,
    FellBack,
    HintDropped,
    ProposalForwarded,
    RequestLabels,
    RequestResumed,
    ResumeCause,
    RoundFinished,
)
from cluster.router.request_policy import RequestPolicy, stamp
from cluster.router.served_model import FlowContext, ServedModel
from cluster.router.target_link import TargetCallbacks, TargetLink

logger = logging.getLogger(__name__)

_GIVEN_UP = (FinishReason.CANCELLED, FinishReason.ERROR)  # by the target, when this router asked for nothing


class RequestFlow:
    """Owns one admitted request: its session, its places in both pools, and its delivery."""

    def __init__(
        self,
        request: GenerateRequest,
        model: ServedModel,
        context: FlowContext,
        delivery: Delivery,
        on_closed: Callable[[], None],
    ) -> None:
        self._request = request
        self._model = model
        self._context = context
        self._delivery = delivery
        self._labels = RequestLabels(request.model, request.tenant, request.workload)
        self._session = SpeculationSession(
            request.request_id, request.prompt_token_ids, request.sampling, request.tenant, context.speculation
        )
        callbacks = TargetCallbacks(self._make_submit, self._on_target_event, self._on_move, self.fail)
        failover = context.limits.failover
        self._target = TargetLink(request.request_id, model.targets, callbacks, failover, context.clock)
        self._draft = DraftLink(request.request_id, model.drafts, self._on_draft_event, self._on_draft_lost)
        self._deadline: float | None = None
        self.policy = RequestPolicy(request, context.policy, model.draft_version)
        self._max_draft_tokens = 0  # what the target may ask for
        self._on_closed = on_closed
        self._is_closed = False
        self._expiry: asyncio.TimerHandle | None = None
        self.last_drafter = Drafter.NONE

    def start(self, deadline: float | None) -> None:
        """Submit to a target and, when speculating, open a draft session: both prefill at the same time.

        `deadline` is on the router's clock. Failures come out of the delivery.
        """
        self._delivery.on_stop = self.close
        self._deadline = deadline
        if deadline is not None:
            delay_s = max(0.0, deadline - self._context.clock()) + self._context.limits.deadline_grace_s
            self._expiry = asyncio.get_running_loop().call_later(delay_s, self._expire)
        actions = self._redecide()
        self._target.start()
        if not self._is_closed:
            self._perform(actions)

    def close(self) -> None:
        """Leave both pools at once: they free everything. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._expiry is not None:
            self._expiry.cancel()
        self._target.close()
        self._session.finish()
        self._draft.close()
        self._on_closed()

    # --- from the target ---------------------------------------------------------------------------------------------

    def _on_target_event(self, event: TargetEvent) -> None:
        try:
            if isinstance(event, Commit):
                self._on_commit(event)
            elif isinstance(event, Refusal):
                self._target.refuse(event)
        except Exception:  # quarantined here, where the client can still be told
            logger.exception("request %s failed in the router", self._request.request_id)
            self.fail(RequestError(ErrorKind.INTERNAL, "the router failed on this request"))

    def _on_commit(self, commit: Commit) -> None:
        if commit.finish_reason in _GIVEN_UP:
            self._target.move(ResumeCause.DROPPED)
            return
        if commit.finish_reason is FinishReason.DEADLINE:
            self._expire()
            return
        self._use_draft(self._follow_policy)
        self._perform(self._session.on_commit(commit, self._context.clock()))

    def _on_move(self, cause: ResumeCause) -> None:
        self._delivery.count(num_resumes=1)
        self._context.observer.request_resumed(RequestResumed(self._labels, cause))

    def _make_submit(self) -> Submit:
        request = self._request
        left_s = None if self._deadline is None else max(0.001, self._deadline - self._context.clock())
        return Submit(
            request.request_id,
            request.prompt_token_ids,
            request.sampling,
            self._max_draft_tokens,
            self._session.output_token_ids,
            request.priority,
            left_s,
            request.tenant,
        )

    def _expire(self) -> None:
        if self._session.committed_len == len(self._request.prompt_token_ids):
            self.fail(RequestError(ErrorKind.DEADLINE, "the deadline passed before the first token"))
        else:
            self._delivery.end(FinishReason.DEADLINE)
            self.close()

    def fail(self, error: RequestError) -> None:
        """End with an error, after what has been committed so far."""
        self._delivery.fail(error)
        self.close()

    # --- from the draft ----------------------------------------------------------------------------------------------

    def _on_draft_event(self, event: DraftEvent) -> None:
        self._use_draft(lambda: self._take_draft_event(event))

    def _take_draft_event(self, event: DraftEvent) -> None:
        if isinstance(event, DraftBlock):
            self._follow_policy()
            self._perform(self._session.on_block(event, self._context.clock()))
        elif isinstance(event, Refusal) and event.epoch == self._session.epoch:
            self._draft.refuse(event)
            self._lose_draft(FallbackCause.REFUSED)

    def _use_draft(self, act: Callable[[], None]) -> None:
        """Whatever goes wrong with guesses, the request goes on without."""
        try:
            act()
        except Exception:
            logger.exception("request %s: its draft is given up", self._request.request_id)
            self._draft.give_up()
            self._lose_draft(FallbackCause.REFUSED)

    def _on_draft_lost(self) -> None:
        self._lose_draft(FallbackCause.LOST)

    def _lose_draft(self, cause: FallbackCause) -> None:
        self._perform(self._session.on_draft_lost(cause))

    # --- decisions ---------------------------------------------------------------------------------------------------

    def on_policy_change(self) -> None:
        """Follow a policy that has just been replaced now, not at the next frame."""
        self._use_draft(self._follow_policy)

    def _follow_policy(self) -> None:
        """Before every use of guesses: the policy may have changed, a draft replica may have come or gone."""
        self._perform(self._redecide())

    def _redecide(self) -> Sequence[Action]:
        decision = self.policy.decide(self._draft.offer(self.policy.killed_versions))
        return () if decision is None else self._obey(decision)

    def _obey(self, decision: Decision) -> Sequence[Action]:
        self._delivery.follow(stamp(decision))
        if decision.reason is Reason.NO_DRAFTER:
            self._report_fallback(FallbackCause.UNAVAILABLE)
        self._bound_target(decision.max_draft_tokens)
        return self._session.on_decision(decision.drafter, decision.max_draft_tokens)

    def _bound_target(self, max_draft_tokens: int) -> None:
        """Let the target ask for guesses only while someone makes them; before it has the request, Submit says so."""
        if max_draft_tokens != self._max_draft_tokens:
            self._max_draft_tokens = max_draft_tokens
            self._target.send(SetDraftLimit(self._request.request_id, max_draft_tokens))

    # --- actions -----------------------------------------------------------------------------------------------------

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if self._is_closed:
                return
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case ToDraft(command):
                if not self._draft.send(command):
                    self._on_draft_lost()
            case Propose(block):
                self._propose(block)
            case Emit(commit, drafter):
                self._emit(commit, drafter)
            case RoundDone():
                self._count_round(action)
            case Dropped(cause):
                self._context.observer.hint_dropped(HintDropped(self._labels, cause))
            case OpenDraft(command):
                if not self._draft.open(command):
                    self._on_draft_lost()
            case CloseDraft(gives_up):
                self._close_draft(gives_up)
            case Fallback(cause):
                if cause is not FallbackCause.WITHDRAWN:
                    self.policy.forget()  # the next commit looks for another drafter
                self._report_fallback(cause)

    def _propose(self, block: DraftBlock) -> None:
        self._target.send(block)
        if block.token_ids:  # else it says that no guess will come
            self._context.observer.proposal_forwarded(ProposalForwarded(self._labels, len(block.token_ids)))

    def _close_draft(self, gives_up: bool) -> None:
        if gives_up:
            self._draft.give_up()
        else:
            self._draft.close()

    def _emit(self, commit: Commit, drafter: Drafter) -> None:
        self._model.totals.add(commit)
        if commit.num_draft_tokens:
            self._count_verification(commit, drafter)
        self._target.progress()
        self._delivery.push(commit)
        if commit.finish_reason is not None:
            self._target.finish()
            self.close()

    def _count_round(self, done: RoundDone) -> None:
        self._draft.prove_useful()
        self.last_drafter = done.drafter
        self._context.observer.round_finished(
            RoundFinished(self._labels, done.drafter, done.round_trip_s, done.draft_time_s, done.num_draft_tokens)
        )

    def _count_verification(self, commit: Commit, drafter: Drafter) -> None:
        timings = commit.timings
        self._context.observer.block_verified(
            BlockVerified(
                self._labels,
                drafter,
                timings.round_trip_s,
                timings.draft_time_s,
                commit.num_draft_tokens,
                commit.num_accepted_tokens,
            )
        )

    def _report_fallback(self, cause: FallbackCause) -> None:
        self._delivery.count(fallback=cause.value)
        self._context.observer.fell_back(FellBack(self._labels, cause))
