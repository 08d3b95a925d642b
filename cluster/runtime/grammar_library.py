"""An engine's compiled grammars. They are compiled in a thread of their own, so that no step waits for one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from cluster.core.grammar import GrammarError
from cluster.grammar.compiler import GrammarCompiler, Matcher
from cluster.messages.request import Grammar
from cluster.tokenizer import TokenizerError

MAX_GRAMMARS = 32  # compiled ones that are kept


class GrammarLibrary:
    """Owns the most recently used grammars: Grammars for an engine's thread.

    load: makes the compiler for the first grammar, in the library's own thread; most engines never need one. on_ready
    is called from there after each compilation.
    """

    def __init__(self, load: Callable[[], GrammarCompiler], max_grammars: int = MAX_GRAMMARS) -> None:
        self.on_ready: Callable[[], None] = lambda: None
        self._thread = ThreadPoolExecutor(1, "paceline-grammars")
        self._load = load
        self._compiler: GrammarCompiler | None = None  # the thread's own
        self._compiling: dict[Grammar, Future[Matcher]] = {}
        self._compiled: OrderedDict[Grammar, Matcher] = OrderedDict()
        self._max_grammars = max_grammars

    def find(self, grammar: Grammar) -> Matcher | None:
        """See Grammars."""
        known = self._compiled.get(grammar)
        if known is None or known.compiled.is_spent:
            compiling = self._compiling.get(grammar) or self._start(grammar)
            if not compiling.done():
                return None
            del self._compiling[grammar]
            self._keep(grammar, compiling.result())
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar].copy()

    def _start(self, grammar: Grammar) -> Future[Matcher]:
        for other, future in list(self._compiling.items()):  # perhaps nobody comes back for it
            if future.done() and future.exception() is None:
                del self._compiling[other]
                self._keep(other, future.result())
        future = self._compiling[grammar] = self._thread.submit(self._compile, grammar)
        future.add_done_callback(lambda _: self.on_ready())
        return future

    def _keep(self, grammar: Grammar, matcher: Matcher) -> None:
        self._compiled[grammar] = matcher
        if len(self._compiled) > self._max_grammars:
            self._compiled.popitem(last=False)

    def _compile(self, grammar: Grammar) -> Matcher:
        try:
            if self._compiler is None:
                self._compiler = self._load()
            return self._compiler.compile(grammar)
        except TokenizerError as error:
            raise GrammarError(str(error)) from error
