"""Which engines do what: the named comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from load_tests.compare.peers.base import Arm, Drafting, PeerName, Weights
from load_tests.compare.workload import Arrivals, Ask, Closed
from load_tests.timed_streams import random_prompt


@dataclass(frozen=True, slots=True)
class Load:
    """What every engine does once in each round."""

    arrivals: Arrivals
    requests: int
    max_tokens: int
    prompt_tokens: int | None = None  # None: the held-out chat prompts; else random tokens, this many

    def __str__(self) -> str:
        return str(self.arrivals) if self.prompt_tokens is None else f"{self.prompt_tokens} prompt tokens"

    def asks(self, number: int, heldout: tuple[tuple[int, ...], ...]) -> list[Ask]:
        """Of round `number`, counted from 0: each takes up where the one before left off."""
        places = range(number * self.requests, (number + 1) * self.requests)
        if self.prompt_tokens is None:
            return [Ask(heldout[place % len(heldout)], self.max_tokens) for place in places]
        return [Ask(random_prompt(Random(f"{self} {place}"), self.prompt_tokens), self.max_tokens) for place in places]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Some engines, and what they do in each round."""

    title: str
    arms: tuple[Arm, ...]
    loads: tuple[Load, ...]
    max_model_len: int
    rounds: int = 5

    @property
    def max_streams(self) -> int:
        return max(load.arrivals.streams if isinstance(load.arrivals, Closed) else load.requests for load in self.loads)


_PLAIN = tuple(Arm(peer) for peer in PeerName)
_GUESSING = (
    Arm(PeerName.PACELINE, Drafting.NGRAM),
    Arm(PeerName.PACELINE, Drafting.MODEL),
    Arm(PeerName.VLLM, Drafting.NGRAM),
    Arm(PeerName.LLAMA_CPP, Drafting.NGRAM),
    Arm(PeerName.TRANSFORMERS, Drafting.NGRAM),
    Arm(PeerName.TRANSFORMERS, Drafting.MODEL),
)
_INT8 = tuple(Arm(peer, weights=Weights.INT8) for peer in (PeerName.PACELINE, PeerName.LLAMA_CPP))

SCENARIOS: Mapping[str, Scenario] = {
    "one-stream": Scenario("One stream, no speculation", _PLAIN, (Load(Closed(1), 2, 128),), max_model_len=1024),
    "many": Scenario(
        "Many streams, no speculation",
        tuple(arm for arm in _PLAIN if arm.peer is not PeerName.TRANSFORMERS),  # it runs one request at a time
        tuple(Load(Closed(streams), streams, 128) for streams in (8, 16, 32)),
        max_model_len=512,
    ),
    "speculation": Scenario(
        "One stream, with and without speculation, all 48 held-out prompts",
        (*_PLAIN, *_GUESSING),
        (Load(Closed(1), 8, 64),),
        max_model_len=1024,
        rounds=6,
    ),
    "int8": Scenario(
        "One stream, 8-bit weights", (*_INT8, *_PLAIN[:1]), (Load(Closed(1), 2, 128),), max_model_len=1024
    ),
    "prefill": Scenario(
        "Long prompts, no speculation",
        _PLAIN,
        tuple(Load(Closed(1), 2, 4, prompt_tokens=length) for length in (512, 2048)),
        max_model_len=4096,
    ),
}
