"""Whether a grammar is any good: a child process is asked, so that a bomb costs its own request and no other."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict

from cluster.core.grammar import GrammarError
from cluster.messages.request import Grammar
from cluster.tokenizer import Vocabulary

MAX_VERDICTS = 256  # that are kept
MAX_WAITING = 64  # grammars to be checked; more are turned away
MAX_WALL_S = 30.0  # for a child that got no processor time; its own limits are far below
TOO_MUCH = "it takes too much time or memory to compile"


class CheckerBusy(Exception):
    """Too many grammars wait to be checked."""


class GrammarChecker:
    """Owns verdicts on one vocabulary's grammars and the child process that finds them. One event loop's."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._verdicts: OrderedDict[Grammar, str | None] = OrderedDict()
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._child: Child | None = None
        self._asking = threading.Lock()  # a cancelled check gives up its turn, but its thread goes on

    async def check(self, grammar: Grammar) -> None:
        """Raises GrammarError saying why a grammar is refused, CheckerBusy when there are too many others."""
        if grammar not in self._verdicts:
            await self._find_out(grammar)
        self._verdicts.move_to_end(grammar)
        verdict = self._verdicts[grammar]
        if verdict is not None:
            raise GrammarError(verdict)

    async def _find_out(self, grammar: Grammar) -> None:
        if self._num_waiting >= MAX_WAITING:
            raise CheckerBusy
        self._num_waiting += 1
        try:
            async with self._turn:
                if grammar not in self._verdicts:
                    self._keep(grammar, await asyncio.to_thread(self._ask, grammar))
        finally:
            self._num_waiting -= 1

    def _keep(self, grammar: Grammar, verdict: str | None) -> None:
        self._verdicts[grammar] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    def _ask(self, grammar: Grammar) -> str | None:
        with self._asking:
            if self._child is None:
                self._child = Child(self._vocabulary)
            try:
                return self._child.ask(grammar)
            except ChildLost:
                self._child = None
                return TOO_MUCH


class ChildLost(Exception):
    """The child ended without an answer."""


class Child:
    """Owns a process of cluster.grammar.child. Ends with it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises RuntimeError if it does not come up."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.grammar.child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        self._end = weakref.finalize(self, _end, self._process)
        pieces = [piece.decode("latin-1") for piece in vocabulary.pieces]
        try:
            self._tell({"pieces": pieces, "special_ids": sorted(vocabulary.special_ids)})
            self._hear()
        except ChildLost as error:
            raise RuntimeError("the process that checks grammars does not start") from error

    def ask(self, grammar: Grammar) -> str | None:
        """Why a grammar is refused, or None. Raises ChildLost, and is of no use then."""
        self._tell({"kind": grammar.kind.value, "source": grammar.source})
        return self._hear()

    def _tell(self, message: dict[str, object]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            self._end()
            raise ChildLost from error

    def _hear(self) -> str | None:
        assert self._process.stdout is not None
        patience = threading.Timer(MAX_WALL_S, self._process.kill)
        patience.start()
        line = self._process.stdout.readline()
        patience.cancel()
        if not line:
            self._end()
            raise ChildLost
        verdict: str | None = json.loads(line)
        return verdict


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
