"""What a grammar costs per row: moving on and masking, looking at a window of guesses, and applying masks.

python -m load_tests.grammar_masks
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from cluster.core.grammar import GrammarGuide
from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.grammar.compiler import GrammarCompiler, Matcher
from cluster.messages.request import Grammar, GrammarKind, SamplingParams
from cluster.runtime.model_store import resolve_model
from cluster.runtime.sampler_cpu import CpuSampler
from cluster.runtime.sampling_batch import SamplingBatch
from cluster.tokenizer import Tokenizer

WINDOW = 4
NUM_SEQUENCES = 8
TEXT = '{"name": "Tom Sawyer", "age": 12, "hobbies": ["music", "running"]}'
SCHEMAS: Mapping[str, dict[str, object]] = {
    "closed schema": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "hobbies": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "hobbies"],
        "additionalProperties": False,
    },
    "any object": {"type": "object"},
}


def timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def in_us(times: list[float], num_rows: int = 1) -> str:
    deciles = statistics.quantiles(times, n=10)
    low, median, high = (1e6 * value / num_rows for value in (deciles[0], statistics.median(times), deciles[-1]))
    return f"{median:6.1f} us [{low:.1f}, {high:.1f}]"


def plain_rows(matcher: Matcher, token_ids: tuple[int, ...]) -> Iterator[float]:
    guide = GrammarGuide(matcher.copy(), frozenset())
    for token_id in token_ids[:-1]:
        yield timed(partial(guide.append, (token_id,)))


def windows(matcher: Matcher, token_ids: tuple[int, ...]) -> Iterator[float]:
    guide = GrammarGuide(matcher.copy(), frozenset())
    for start in range(0, len(token_ids) - WINDOW - 2, WINDOW + 1):
        yield timed(partial(_verify, guide, token_ids[start : start + WINDOW + 1]))


def _verify(guide: GrammarGuide, emitted: tuple[int, ...]) -> None:
    guide.masks(guide.legal_prefix(emitted[:WINDOW]))
    guide.append(emitted)


def sampling_times(bits: bytes | None, temperature: float) -> list[float]:
    num_rows = WINDOW + 1
    params = SamplingParams(max_tokens=1, seed=0, temperature=temperature)
    masks = None if bits is None else bits * num_rows
    items = (
        ScheduledSequence(str(i), (1,) * num_rows, 4, (0, 1), num_rows, params, WINDOW, None, masks)
        for i in range(NUM_SEQUENCES)
    )
    step, sampler = SchedulerOutput(tuple(items)), CpuSampler()
    logits = 3 * torch.randn(NUM_SEQUENCES * num_rows, 49_152, generator=torch.Generator().manual_seed(0))
    times = [timed(lambda: sampler.sample(logits, SamplingBatch.build(step))) for _ in range(60)]
    return times[10:]


def main() -> None:
    tokenizer = Tokenizer.load(resolve_model("smollm2-135m"))
    vocabulary, token_ids = tokenizer.vocabulary, tokenizer.encode(TEXT)
    compiler = GrammarCompiler(vocabulary.pieces, vocabulary.special_ids, (2,), 49_152)
    for name, schema in SCHEMAS.items():
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        print(f"{name}: compiling {1e3 * timed(partial(compiler.compile, grammar)):.1f} ms")
        matcher = compiler.compile(grammar)
        plain = [t for _ in range(20) for t in plain_rows(matcher, token_ids)]
        ahead = [t for _ in range(20) for t in windows(matcher, token_ids)]
        print(f"  a plain row, per row              {in_us(plain)}")
        print(f"  a window of {WINDOW} guesses, per row     {in_us(ahead, WINDOW + 1)}")
    for temperature in (0.0, 1.0):
        for label, bits in (("free", None), ("masked", matcher.mask().bits)):
            times = in_us(sampling_times(bits, temperature), NUM_SEQUENCES * (WINDOW + 1))
            print(f"sampling at temperature {temperature}, {label:6}, per row {times}")


if __name__ == "__main__":
    main()
