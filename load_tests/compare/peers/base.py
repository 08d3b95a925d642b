"""What an engine has to say about itself to be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from load_tests.compare.workload import Ask

Say = Callable[[str], None]  # one line about what goes on, which replaces the one before


class AbsentError(Exception):
    """An engine, or a way of running it, cannot be had on this machine; the message is the reason."""


class PeerName(StrEnum):
    PACELINE = "paceline"
    VLLM = "vllm"
    LLAMA_CPP = "llama.cpp"
    TRANSFORMERS = "transformers"


class Drafting(StrEnum):
    """Who guesses tokens ahead."""

    NONE = "plain"
    NGRAM = "ngram"
    MODEL = "draft"


class Weights(StrEnum):
    BFLOAT16 = "bf16"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of running one engine."""

    peer: PeerName
    drafting: Drafting = Drafting.NONE
    weights: Weights = Weights.BFLOAT16

    def __str__(self) -> str:
        parts = (self.peer, *((self.drafting,) if self.drafting is not Drafting.NONE else ()), self.weights)
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What is the same for every engine."""

    model: Path  # a directory in transformers' format, bf16
    draft: Path  # the demo draft's
    cache: Path  # environments, converted weights, logs
    cores: tuple[int, ...]
    threads: int
    max_model_len: int
    max_streams: int
    max_draft_tokens: int


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How to start a server. `environment` is added to this process's own; `ready_path` answers 200 once it serves.

    `note`: what a reader has to know about how it runs, if it is not as usual.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    ready_path: str
    note: str | None = None


class Peer(Protocol):
    """An engine. Any method may raise AbsentError."""

    def prepare(self, conditions: Conditions, say: Say) -> None:
        """Make its environment and weights, if they are not there yet."""

    def server_of(self, arm: Arm) -> Arm:
        """The arm whose server serves this one too: itself, or one that differs in what requests say only."""

    def command(self, arm: Arm, conditions: Conditions, port: int) -> ServerCommand:
        """The server of an arm."""

    def body(self, arm: Arm, ask: Ask) -> dict[str, object]:
        """A request's body but for streaming: greedy, ignoring the end of sequence."""
