"""New grammars are compiled in a process of their own."""

from __future__ import annotations

import asyncio
import json

import pytest

from cluster.core.grammar import GrammarError
from cluster.grammar import checker as checking
from cluster.grammar.checker import CheckerBusy, Child, GrammarChecker
from cluster.messages.request import Grammar, GrammarKind
from cluster.tokenizer import Vocabulary
from tests.fakes import byte_tokenizer
from tests.grammars import regex

pytestmark = pytest.mark.unit

BYTES = byte_tokenizer().vocabulary
LONG_TOKENS = Vocabulary((*BYTES.pieces, *(b"a" * n for n in range(2, 200))), BYTES.special_ids)

BOMBS = {
    "patterns that all hold": Grammar(
        GrammarKind.JSON_SCHEMA,
        json.dumps({"allOf": [{"type": "string", "pattern": f".*a{i}.*"} for i in range(20)]}),
    ),
    "multiples of many": Grammar(
        GrammarKind.JSON_SCHEMA,
        json.dumps({"allOf": [{"type": "integer", "multipleOf": n} for n in (3, 5, 7, 11, 13, 17, 19, 23)]}),
    ),
    "catastrophic": regex("a?" * 8000 + "a" * 8000),
}


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_is_refused_and_the_next_grammar_is_served(name: str) -> None:
    """The child's limits end it: a second or two of processor time, and its memory."""
    checker = GrammarChecker(LONG_TOKENS)
    await checker.check(regex("a+"))
    with pytest.raises(GrammarError, match="too m"):
        await checker.check(BOMBS[name])
    await checker.check(regex("b+"))
    with pytest.raises(GrammarError, match="unclosed group"):
        await checker.check(regex("("))


async def test_a_verdict_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "MAX_VERDICTS", 2)
    checker = GrammarChecker(BYTES)
    asked: list[str] = []

    def ask(grammar: Grammar) -> str | None:
        asked.append(grammar.source)
        return None

    monkeypatch.setattr(checker, "_ask", ask)
    await asyncio.gather(*(checker.check(regex("a")) for _ in range(5)))
    for source in ("b", "a", "c", "a", "b"):
        await checker.check(regex(source))
    assert asked == ["a", "b", "c", "b"]


async def test_too_many_new_grammars_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "MAX_WAITING", 3)
    checker = GrammarChecker(BYTES)
    answers = await asyncio.gather(*(checker.check(regex("a" * n)) for n in range(1, 6)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [type(None)] * 3 + [CheckerBusy] * 2
    await checker.check(regex("b"))


async def test_a_caller_that_goes_away_does_not_leave_its_answer_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    ask = Child.ask

    def ask_and_tell(child: Child, grammar: Grammar) -> str | None:
        loop.call_soon_threadsafe(asked.set)
        return ask(child, grammar)

    monkeypatch.setattr(Child, "ask", ask_and_tell)
    checker = GrammarChecker(LONG_TOKENS)
    task = asyncio.create_task(checker.check(BOMBS["catastrophic"]))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await checker.check(regex("b"))
    with pytest.raises(GrammarError, match="unclosed"):
        await checker.check(regex("(a"))
    await checker.check(regex("a"))
