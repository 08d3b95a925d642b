"""The process that compiles grammars which nobody has seen before: what they can exhaust is its own.

It reads lines of JSON: first the vocabulary, then one grammar at a time. It answers each, the
vocabulary too, with a line: null, or why the grammar is refused. A grammar that takes too much processor time or memory
ends the process without an answer.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from cluster.core.grammar import GrammarError
from cluster.grammar.compiler import GrammarCompiler
from cluster.messages.request import Grammar, GrammarKind

MAX_CPU_S = 1  # of one compilation; counted in whole seconds, so up to one more
MAX_MASK_S = 0.1  # processor time of a token's mask
MAX_MEMORY_BYTES = 1 << 30


def serve(commands: TextIO, answers: TextIO) -> None:
    """Answer until there are no more commands."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    vocabulary = json.loads(commands.readline())
    pieces = [piece.encode("latin-1") for piece in vocabulary["pieces"]]
    compiler = GrammarCompiler(pieces, vocabulary["special_ids"], ())
    _answer(answers, None)  # ready
    for line in commands:
        _limit_cpu()
        _answer(answers, _verdict(compiler, json.loads(line)))


def _answer(answers: TextIO, verdict: str | None) -> None:
    answers.write(json.dumps(verdict) + "\n")
    answers.flush()


def _limit_cpu() -> None:
    limit = int(time.process_time()) + 1 + MAX_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _verdict(compiler: GrammarCompiler, command: Mapping[str, str]) -> str | None:
    try:
        matcher = compiler.compile(Grammar(GrammarKind(command["kind"]), command["source"]))
        began = time.process_time()
        matcher.copy().mask()
    except GrammarError as error:
        return str(error)
    return "matching it takes too much work" if time.process_time() - began > MAX_MASK_S else None


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
