"""An engine's grammars: compiled beside the steps, the latest kept, none lost on the way."""

from __future__ import annotations

import threading

import pytest

from cluster.core.grammar import GrammarError
from cluster.grammar.compiler import GrammarCompiler, Matcher
from cluster.messages.answer import FinishReason
from cluster.messages.request import Grammar
from cluster.messages.rounds import Abort, Commit, Refusal, RefusalReason, Submit
from cluster.runtime.grammar_library import GrammarLibrary
from cluster.tokenizer import TokenizerError
from tests.engines import EOS, target_pool
from tests.fakes import sampling
from tests.grammars import PIECES, InstantGrammars, regex, text_of
from tests.logit_engines import LogitRunner, LogitToy

pytestmark = pytest.mark.unit


def library(**options) -> tuple[GrammarLibrary, Turnstile]:
    turnstile = Turnstile()
    made = GrammarLibrary(lambda: GatedCompiler(GrammarCompiler(PIECES, (), EOS), turnstile), **options)
    made.on_ready = turnstile.ready.release
    return made, turnstile


class Turnstile:
    """Lets one compilation through at a time, so that the first look at a grammar always comes before it."""

    def __init__(self) -> None:
        self.gate, self.ready = threading.Semaphore(0), threading.Semaphore(0)

    def acquire(self, timeout: float) -> bool:
        """Let the next one through, and wait for its end."""
        self.gate.release()
        return self.ready.acquire(timeout=timeout)


class GatedCompiler:
    """A compiler behind a turnstile."""

    def __init__(self, compiler: GrammarCompiler, turnstile: Turnstile) -> None:
        self._compiler, self._turnstile = compiler, turnstile

    def compile(self, grammar: Grammar) -> Matcher:
        self._turnstile.gate.acquire()
        return self._compiler.compile(grammar)


def submit(source: str, request_id: str = "r", **fields) -> Submit:
    return Submit(request_id, (1, 2), sampling(grammar=regex(source), temperature=0.0), **fields)


def test_a_grammar_is_found_once_it_is_compiled() -> None:
    grammars, ready = library()
    assert grammars.find(regex("ab")) is None
    assert ready.acquire(timeout=10)
    one, other = grammars.find(regex("ab")), grammars.find(regex("ab"))
    assert one is not None
    assert other is not None
    assert one.accept([PIECES.index(b"ab")]) == 1
    assert other.mask().allows(PIECES.index(b"ab"))  # it is at the start still


def test_the_latest_grammars_are_kept_and_others_are_compiled_again() -> None:
    grammars, ready = library(max_grammars=2)

    def is_known(source: str) -> bool:
        if grammars.find(regex(source)) is not None:
            return True
        assert ready.acquire(timeout=10)
        assert grammars.find(regex(source)) is not None
        return False

    assert [is_known(source) for source in "abacab"] == [False, False, True, False, True, False]


def test_what_cannot_be_compiled_or_loaded_is_an_error() -> None:
    grammars, ready = library()
    assert grammars.find(regex("(")) is None
    assert ready.acquire(timeout=10)
    with pytest.raises(GrammarError, match="unclosed"):
        grammars.find(regex("("))

    ready = Turnstile()

    def fail() -> GrammarCompiler:
        ready.gate.acquire()
        raise TokenizerError("no such directory")

    grammars = GrammarLibrary(fail)
    grammars.on_ready = ready.ready.release
    assert grammars.find(regex("a")) is None
    assert ready.acquire(timeout=10)
    with pytest.raises(GrammarError, match="no such directory"):
        grammars.find(regex("a"))


def test_a_request_waits_for_its_grammar_and_no_other_waits_for_it() -> None:
    pool = target_pool(runner=LogitRunner(LogitToy(len(PIECES))), grammars=InstantGrammars(delay=5))
    free = Submit("free", (1, 2), sampling(max_tokens=3, temperature=0.0, ignore_eos=True))
    pool.engine.handle([submit("abc"), free])
    pool.engine.step()
    assert len(pool.output("free")) == 1
    assert pool.output("r") == ()
    for _ in range(10):
        pool.engine.step()
    assert text_of(pool.output("r")) == "abc"


def test_a_request_that_goes_away_while_its_grammar_is_compiled_is_forgotten() -> None:
    grammars = InstantGrammars(delay=1)
    pool = target_pool(runner=LogitRunner(LogitToy(len(PIECES))), grammars=grammars)
    pool.engine.handle([submit("abc"), Abort("r")])
    pool.run()
    assert pool.of(Commit) == []
    pool.engine.handle([submit("abc")])  # its name is free again
    pool.run()
    assert pool.of(Commit)[-1].finish_reason is FinishReason.STOP
    assert pool.is_free()


@pytest.mark.parametrize(
    ("request_", "grammars", "says"),
    [
        (submit("("), InstantGrammars(), "unclosed group"),
        (submit("abc"), None, "knows no grammars"),
        (submit("abc", output_token_ids=(3,)), InstantGrammars(), "does not follow"),
    ],
)
def test_a_grammar_that_is_of_no_use_ends_its_own_request(request_: Submit, grammars: object, says: str) -> None:
    pool = target_pool(runner=LogitRunner(LogitToy(len(PIECES))), grammars=grammars)
    free = Submit("free", (1, 2), sampling(max_tokens=3, temperature=0.0, ignore_eos=True))
    pool.engine.handle([request_, free])
    pool.run()
    [refusal] = pool.of(Refusal)
    assert (refusal.request_id, refusal.reason) == ("r", RefusalReason.UNSUPPORTED)
    assert says in refusal.message
    assert len(pool.output("free")) == 3
    assert pool.is_free()


def test_a_matcher_that_fails_on_committed_tokens_ends_its_own_request_with_an_error() -> None:
    class Failing(InstantGrammars):
        def find(self, grammar):
            matcher = super().find(grammar)
            accept = matcher.accept
            matcher.accept = lambda token_ids: accept(token_ids) if len(matcher._accepted) < 2 else 0
            return matcher

    pool = target_pool(runner=LogitRunner(LogitToy(len(PIECES))), grammars=Failing())
    free = Submit("free", (1, 2), sampling(max_tokens=6, temperature=0.0, ignore_eos=True))
    pool.engine.handle([submit("[abc]{5}"), free])
    pool.run()
    last = {commit.request_id: commit.finish_reason for commit in pool.of(Commit)}
    assert last == {"r": FinishReason.ERROR, "free": FinishReason.LENGTH}
    assert pool.is_free()


def test_a_model_that_has_no_token_for_a_grammar_ends_its_own_request() -> None:
    """Whatever min_tokens suppresses is all that this grammar allows: ingress refuses that, and so does an engine."""
    pool = target_pool(runner=LogitRunner(LogitToy(len(PIECES))), grammars=InstantGrammars())
    params = sampling(grammar=regex("xa"), temperature=0.0, min_tokens=5, stop_token_ids=(PIECES.index(b"a"),))
    free = Submit("free", (1, 2), sampling(max_tokens=3, temperature=0.0, ignore_eos=True))
    pool.engine.handle([Submit("r", (1, 2), params), free])
    pool.run()
    [refusal] = pool.of(Refusal)
    assert (refusal.request_id, refusal.reason) == ("r", RefusalReason.UNSUPPORTED)
    assert len(pool.output("free")) == 3
    assert pool.is_free()
