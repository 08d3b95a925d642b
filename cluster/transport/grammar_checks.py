"""Grammars are looked at before their requests are taken, off the event loop."""

from __future__ import annotations

from cluster.core.grammar import GrammarError
from cluster.grammar.checker import CheckerBusy, GrammarChecker
from cluster.messages.answer import ErrorKind, RequestError
from cluster.tokenizer import Tokenizer
from cluster.transport.validation import GenerationFields, InvalidRequest


class GrammarChecks:
    """Owns a checker per model."""

    def __init__(self) -> None:
        self._checkers: dict[str, GrammarChecker] = {}

    async def check(self, model: str, tokenizer: Tokenizer, fields: GenerationFields) -> None:
        """Raises InvalidRequest naming the field whose grammar cannot be used, or RequestError(OVERLOADED)."""
        constraint = fields.constraint
        if constraint is None:
            return
        checker = self._checkers.get(model)
        if checker is None:
            checker = self._checkers[model] = GrammarChecker(tokenizer.vocabulary)
        try:
            await checker.check(constraint.grammar)
        except GrammarError as error:
            raise InvalidRequest(f"{constraint.param}: {error}", constraint.param) from error
        except CheckerBusy as error:
            message = "Too many new grammars are being checked; try again"
            raise RequestError(ErrorKind.OVERLOADED, message, retry_after_s=1.0) from error
