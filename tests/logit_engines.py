"""Toy models with real logits, sampled by the real samplers: for parameters that change what a row becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.core import sampling as reference
from cluster.core.grammar import TokenMask, TokenMatcher
from cluster.core.step import SchedulerOutput, StepOutput
from cluster.messages.request import SamplingParams
from cluster.messages.rounds import Commit, DraftBlock, Submit
from cluster.runtime.sampler import Sampler, collect_step_output
from cluster.runtime.sampler_cpu import CpuSampler
from cluster.runtime.sampling_batch import SamplingBatch
from tests.engines import BLOCK_SIZE, EOS, MAX_LEN, Pool
from tests.fakes import ToyModel, ToyRunner, _mix

EOS_ID = min(EOS)


@dataclass(frozen=True)
class LogitToy(ToyModel):
    """Logits that favour a short loop of tokens, with some of their own at each prefix.

    `favourite` is preferred everywhere instead. `noise` makes a model that differs from the one without.
    """

    vocab_size: int = 50
    loop: int = 3  # tokens 10, 11, … follow one another
    pull: float = 3.0
    favourite: int | None = None
    noise: float = 0.0

    def logits(self, prefix_hash: int, last_token: int) -> NDArray[np.float32]:
        """Of the token after a prefix, [vocab_size]."""
        values = 4 * self._uniform(prefix_hash) - 2
        if self.noise:
            values += self.noise * (self._uniform(_mix(prefix_hash, 1)) - 0.5)
        next_token = 10 + (last_token - 9) % self.loop if self.favourite is None else self.favourite
        values[next_token] += self.pull
        return values.astype(np.float32)

    def _uniform(self, seed: int) -> NDArray[np.float64]:
        return np.random.default_rng(seed).random(self.vocab_size)

    def output(self, submit: Submit, matcher: TokenMatcher | None = None) -> tuple[int, ...]:
        """What plain decoding must give, token by token, by the reference sampler: the only right output.

        matcher: of the request's grammar.
        """
        params, prompt = submit.sampling, submit.prompt_token_ids
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else EOS)
        output: list[int] = []
        while len(output) < params.max_tokens and len(prompt) + len(output) < MAX_LEN:
            mask = None if matcher is None else matcher.mask()
            if mask is not None and not mask.has_next:
                break
            output.append(self._next(params, prompt, output, stops, mask))
            if output[-1] in stops:
                break
            assert matcher is None or matcher.accept(output[-1:])
        return tuple(output)

    def _next(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int],
        stops: frozenset[int],
        mask: TokenMask | None,
    ) -> int:
        prefix_hash = 0
        for token_id in (*prompt, *output):
            prefix_hash = _mix(prefix_hash, token_id)
        logits = self.logits(prefix_hash, (*prompt, *output)[-1]).tolist()
        adjusted = reference.adjusted(logits, params, prompt, output, stops)
        if mask is not None:
            adjusted = reference.masked(adjusted, mask)
        return reference.sample(adjusted, params, len(prompt) + len(output))


class LogitRunner(ToyRunner):
    """Runs steps on a LogitToy and samples as a real runner does: rows of logits through a real sampler."""

    def __init__(self, model: LogitToy, sampler: Sampler | None = None) -> None:
        super().__init__(BLOCK_SIZE, model)
        self._toy = model
        self._sampler = sampler or CpuSampler()

    def _run(self, step: SchedulerOutput) -> StepOutput:
        rows = []
        for item in step.scheduled:
            hashes = self._ingest(item)
            first = len(hashes) - item.num_samples
            rows += map(self._toy.logits, hashes[first:], item.token_ids[first:])
        logits = np.array(rows, np.float32).reshape(-1, self._toy.vocab_size)
        return collect_step_output(step, self._sampler.sample(torch.from_numpy(logits), SamplingBatch.build(step)))


Guess = Callable[[tuple[int, ...], int], Sequence[int]]


def run_with_guesses(target: Pool, submit: Submit, guess: Guess) -> list[Commit]:
    """Answer every request for guesses with guess(output so far, number); the commits until the request has finished.

    The target must hold sequences for their blocks.
    """
    target.engine.handle([submit])
    commits: list[Commit] = []
    for _ in range(1000):
        target.engine.step()
        for commit in target.of(Commit)[len(commits) :]:
            commits.append(commit)
            if commit.finish_reason is not None:
                return commits
            if commit.next_draft_len:
                output = target.output(submit.request_id)
                committed_len = commit.base_len + len(commit.token_ids)
                guesses = tuple(guess(output, commit.next_draft_len))
                target.engine.handle([DraftBlock(submit.request_id, committed_len, guesses)])
    raise AssertionError("the request does not finish")


def truth_with(right: Sequence[int], wrong: int, offset: int) -> Guess:
    """Guesses that are right up to `offset`, where they are `wrong`, and right again after it."""

    def guess(output: tuple[int, ...], count: int) -> list[int]:
        guesses = [*right[len(output) : len(output) + count]]
        guesses += [wrong] * (count - len(guesses))
        guesses[min(offset, count - 1)] = wrong
        return guesses

    return guess


PARAMETERS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "presence below 0": {"presence_penalty": -1.0},
    "frequency": {"frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.6},
    "bias": {"logit_bias": ((10, -100.0), (11, 4.0), (EOS_ID, 2.0))},
    "min_tokens": {"min_tokens": 9, "logit_bias": ((EOS_ID, 6.0),)},
    "min_tokens and stop tokens": {"min_tokens": 7, "stop_token_ids": (10, 11, 12)},
    "all": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": ((12, 1.0), (13, -100.0), (EOS_ID, 3.0)),
        "min_tokens": 12,
        "stop_token_ids": (30,),
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.01,
        "num_logprobs": 2,
    },
}
