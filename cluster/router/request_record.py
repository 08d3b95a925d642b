"""What is reported of one call of generate(), however it ends."""

from __future__ import annotations

from cluster.messages.answer import ErrorKind, FinishReason, RequestError, TokenDelta
from cluster.messages.request import Drafter, GenerateRequest
from cluster.router.delivery import Delivery
from cluster.router.observer import Outcome, RequestFinished, RequestLabels, RequestStarted, RouterObserver
from cluster.router.request_flow import RequestFlow
from cluster.router.request_log import log_finished

_OUTCOME_OF_FINISH = {
    FinishReason.STOP: Outcome.STOP,
    FinishReason.LENGTH: Outcome.LENGTH,
    FinishReason.DEADLINE: Outcome.DEADLINE,
}
_OUTCOME_OF_ERROR = {
    ErrorKind.INVALID: Outcome.INVALID,
    ErrorKind.CONTEXT_LENGTH: Outcome.INVALID,
    ErrorKind.NOT_FOUND: Outcome.INVALID,
    ErrorKind.OVERLOADED: Outcome.OVERLOADED,
    ErrorKind.UNAVAILABLE: Outcome.UNAVAILABLE,
    ErrorKind.DEADLINE: Outcome.DEADLINE,
}


class RequestRecord:
    """Owns the two reports of a request: that it has started, and how it ended."""

    def __init__(self, request: GenerateRequest, delivery: Delivery, observer: RouterObserver) -> None:
        self.request = request
        self.delivery = delivery
        self.outcome: Outcome | None = None  # None: still running, or left by its client
        self._observer = observer
        self._labels = RequestLabels(request.model, request.tenant, request.workload)
        self._flow: RequestFlow | None = None
        self._admission_s: float | None = None
        observer.request_started(RequestStarted(request.request_id, self._labels, len(request.prompt_token_ids)))

    def admit(self, flow: RequestFlow, now: float) -> None:
        """The request has a slot, and runs in `flow`."""
        self._flow = flow
        self._admission_s = now - self.delivery.marks.arrival

    def note(self, delta: TokenDelta) -> None:
        """A delta goes to the client; the last one decides the outcome."""
        if delta.finish_reason is not None:
            self.outcome = _OUTCOME_OF_FINISH.get(delta.finish_reason, Outcome.ERROR)

    def fail(self, error: RequestError) -> None:
        """The client gets an error."""
        self.outcome = _OUTCOME_OF_ERROR.get(error.kind, Outcome.ERROR)

    def finish(self, now: float) -> RequestFinished:
        """The call is over: whatever still runs for it is left, then it is reported."""
        if self._flow is not None:
            self._flow.close()
        stats, marks = self.delivery.stats, self.delivery.marks
        e2e_s = now - marks.arrival
        event = RequestFinished(
            self.request.request_id,
            self._labels,
            self.outcome or Outcome.CANCELLED,
            marks.ttft_s,
            marks.tpot_s(stats.completion_tokens),
            e2e_s,
            e2e_s if self._admission_s is None else self._admission_s,
            Drafter.NONE if self._flow is None else self._flow.last_drafter,
            stats,
            self.request.sampling.temperature,
            None if self._flow is None else self._flow.policy.draft_version,
            self.delivery.meter.read(),
        )
        self._observer.request_finished(event)
        log_finished(event)
        return event
