"""Submissions whose grammar is still being compiled."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.core.grammar import GrammarError, Grammars, TokenMatcher
from cluster.messages.rounds import Submit


class GrammarGate:
    """Owns the submissions that wait for their grammar, oldest first."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._waiting: dict[str, tuple[Submit, float]] = {}

    def hold(self, submit: Submit, now: float) -> None:
        """Keep a submission until its grammar is compiled."""
        self._waiting[submit.request_id] = (submit, now)

    def forget(self, request_id: str) -> bool:
        """Whether it was waiting."""
        return self._waiting.pop(request_id, None) is not None

    def find(self, submit: Submit) -> TokenMatcher | None:
        """A matcher of its grammar, None while that is being compiled. Raises GrammarError."""
        grammar = submit.sampling.grammar
        if grammar is None or self._grammars is None:
            raise GrammarError("this replica knows no grammars")
        return self._grammars.find(grammar)

    def take_ready(self) -> Iterator[tuple[Submit, float]]:
        """Submissions that need not wait any longer, with the times they came; whether to be served or refused."""
        for submit, received_at in list(self._waiting.values()):
            if self._is_done(submit):
                del self._waiting[submit.request_id]
                yield submit, received_at

    def _is_done(self, submit: Submit) -> bool:
        try:
            return self.find(submit) is not None
        except GrammarError:
            return True
