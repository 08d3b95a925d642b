"""Parameters that change logits hold at every position of a verification window, not at its last one only."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.messages.request import Drafter, GenerateRequest, SpeculationOverride
from cluster.messages.rounds import Commit, Submit
from cluster.runtime.sampler import Sampler
from cluster.runtime.sampler_cpu import CpuSampler
from cluster.runtime.sampler_torch import TorchSampler
from tests.engines import Pool, TinyRouter, draft_pool, target_pool
from tests.fakes import byte_tokenizer, sampling
from tests.logit_engines import EOS_ID, PARAMETERS, LogitRunner, LogitToy, run_with_guesses, truth_with
from tests.toy_cluster import MODEL, collect, tokens_of, toy_cluster

pytestmark = pytest.mark.property

DRAFT_LEN = 4
OFFSETS = range(DRAFT_LEN)
TEMPERATURES = [0.0, 1.0]
each_parameter = pytest.mark.parametrize("name", PARAMETERS)
each_temperature = pytest.mark.parametrize("temperature", TEMPERATURES)


def target(model: LogitToy, sampler: Sampler | None = None, **options: Any) -> Pool:
    return target_pool(runner=LogitRunner(model, sampler), **options)


def submit(request_id: str = "r", prompt: tuple[int, ...] = (10, 5, 10), **fields: Any) -> Submit:
    return Submit(request_id, prompt, sampling(**{"max_tokens": 24, "seed": 3, **fields}), DRAFT_LEN)


# --- what a draft proposes, offset by offset -------------------------------------------------------------------------


@each_temperature
@pytest.mark.parametrize("offset", OFFSETS)
def test_a_banned_token_is_never_emitted_wherever_in_the_window_it_is_drafted(offset: int, temperature: float) -> None:
    model = LogitToy(favourite=7, pull=12.0)
    free = submit(temperature=temperature, ignore_eos=True)
    assert model.output(free).count(7) > 20
    banned = submit(temperature=temperature, ignore_eos=True, logit_bias=((7, -100.0),))
    right = model.output(banned)
    commits = run_with_guesses(pool := target(model), banned, truth_with(right, 7, offset))
    assert 7 not in pool.output("r")
    assert pool.output("r") == right
    assert all(commit.num_accepted_tokens == min(offset, commit.num_draft_tokens - 1) for commit in verified(commits))


def verified(commits: list[Commit]) -> list[Commit]:
    return [commit for commit in commits if commit.num_draft_tokens]


@each_temperature
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 4, 5, 6, 9, 24])
def test_no_end_of_sequence_is_emitted_early_wherever_in_the_window_it_is_drafted(
    min_tokens: int, offset: int, temperature: float
) -> None:
    model = LogitToy(favourite=EOS_ID, pull=40.0)  # says nothing else
    request = submit(temperature=temperature, min_tokens=min_tokens)
    right = model.output(request)
    pool = target(model)
    run_with_guesses(pool, request, truth_with(right, EOS_ID, offset))
    assert pool.output("r") == right
    assert EOS_ID not in right[:min_tokens]
    assert len(right) == min(min_tokens + 1, 24)


def test_a_stop_token_is_suppressed_until_min_tokens_and_ends_the_output_from_then_on() -> None:
    model = LogitToy(favourite=9, pull=40.0)
    request = submit(temperature=0.0, min_tokens=6, stop_token_ids=(9, 8))
    pool = target(model)
    run_with_guesses(pool, request, lambda _, count: (9,) * count)
    assert pool.output("r")[6:] == (9,)
    assert not {8, 9} & set(pool.output("r")[:6])


def test_an_ignored_end_of_sequence_is_no_end_for_min_tokens_to_suppress() -> None:
    model = LogitToy(favourite=EOS_ID, pull=40.0)
    request = submit(temperature=0.0, min_tokens=6, ignore_eos=True)
    pool = target(model)
    run_with_guesses(pool, request, lambda _, count: (EOS_ID,) * count)
    assert pool.output("r") == (EOS_ID,) * 24


@each_temperature
@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 3.0}], ids=str
)
def test_penalties_break_a_loop_inside_the_window(penalty: dict[str, float], temperature: float) -> None:
    model = LogitToy(loop=2, pull=4.5)
    loop = model.output(submit(temperature=0.0, ignore_eos=True))
    assert set(loop) == {10, 11}
    request = submit(temperature=temperature, ignore_eos=True, **penalty)
    right = model.output(request)
    assert len(set(right)) > 5
    looping = target(model)
    run_with_guesses(looping, request, lambda output, count: (10, 11, 10, 11, 10)[len(output) % 2 :][:count])
    assert looping.output("r") == right
    told = target(model)  # every guess is right, so every row of every window must count the guesses before it
    commits = run_with_guesses(told, request, lambda output, count: right[len(output) : len(output) + count])
    assert told.output("r") == right
    assert [len(commit.token_ids) for commit in commits] == [1, 5, 5, 5, 5, 3]


def test_a_window_of_one_repeated_token_counts_it_once_per_place() -> None:
    model = LogitToy(favourite=7, pull=5.0)
    request = submit(temperature=0.0, ignore_eos=True, frequency_penalty=1.5)
    right = model.output(request)
    assert right[:3] == (7, 7, 45)  # the third place is the second of the first window
    pool = target(model)
    run_with_guesses(pool, request, lambda _, count: (7,) * count)
    assert pool.output("r") == right


def test_frequency_and_presence_penalties_do_not_count_the_prompt_and_a_repetition_penalty_does() -> None:
    model = LogitToy(favourite=7, pull=6.0)
    prompt = (7,) * 20
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        assert model.output(submit(prompt=prompt, temperature=0.0, max_tokens=1, **penalty)) == (7,)
        pool = target(model)
        run_with_guesses(pool, submit(prompt=prompt, temperature=0.0, max_tokens=1, **penalty), lambda _, count: ())
        assert pool.output("r") == (7,)
    pool = target(model)
    request = submit(prompt=prompt, temperature=0.0, max_tokens=1, repetition_penalty=10.0)
    run_with_guesses(pool, request, lambda _, count: ())
    assert pool.output("r") == model.output(request) != (7,)


# --- engines joined --------------------------------------------------------------------------------------------------


def submissions(name: str, temperature: float) -> list[Submit]:
    chance = random.Random(name)
    return [
        submit(
            f"r{index}",
            tuple(chance.randrange(1, 50) for _ in range(chance.randint(1, 30))),
            temperature=temperature,
            max_tokens=chance.randint(10, 40),
            seed=chance.randrange(2**64),
            **({} if index == 3 else PARAMETERS[name]),  # one that uses nothing, beside them
        )
        for index in range(4)
    ]


@each_temperature
@each_parameter
def test_a_draft_that_is_the_target_is_accepted_in_full(name: str, temperature: float) -> None:
    model = LogitToy()
    router = TinyRouter(pool := target(model), drafts := draft_pool(runner=LogitRunner(model)))
    requests = submissions(name, temperature)
    for request in requests:
        router.submit(request)
    router.run(lambda: None)
    router.close()
    assert [pool.output(request.request_id) for request in requests] == [model.output(r) for r in requests]
    unfinished = [commit for commit in pool.of(Commit) if commit.finish_reason is None]
    assert all(commit.num_accepted_tokens == commit.num_draft_tokens for commit in unfinished)
    assert sum(commit.num_draft_tokens for commit in unfinished) > 10
    assert pool.is_free()
    assert drafts.is_free()


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(list(PARAMETERS)),
    temperature=st.sampled_from(TEMPERATURES),
    noise=st.sampled_from([0.5, 3.0, 20.0]),
    sampler=st.sampled_from([CpuSampler(), TorchSampler()]),
    num_blocks=st.sampled_from([22, 200]),
)
def test_any_draft_leaves_the_output_as_it_is(
    name: str, temperature: float, noise: float, sampler: Sampler, num_blocks: int
) -> None:
    """Preemption included: 22 blocks do not hold four sequences."""
    model = LogitToy()
    pool = target(model, sampler, num_blocks=num_blocks)
    router = TinyRouter(pool, draft_pool(num_blocks=num_blocks, runner=LogitRunner(LogitToy(noise=noise), sampler)))
    requests = submissions(name, temperature)
    for request in requests:
        router.submit(request)
    router.run(lambda: None)
    assert [pool.output(request.request_id) for request in requests] == [model.output(r) for r in requests]
    assert pool.engine.faults.total == 0


@each_parameter
def test_a_resumed_request_counts_the_output_that_it_came_with(name: str) -> None:
    model = LogitToy()
    for request in submissions(name, 1.0)[:3]:
        right = model.output(request)
        for num_known in range(1, len(right)):
            resumed = Submit("r", request.prompt_token_ids, request.sampling, DRAFT_LEN, right[:num_known])
            pool = target(model)
            run_with_guesses(pool, resumed, lambda output, count: ())
            assert right[:num_known] + pool.output("r") == right


# --- the whole way, with every drafter -------------------------------------------------------------------------------


@each_parameter
async def test_every_drafter_gives_the_same_output(name: str) -> None:
    model = LogitToy()
    drafters = [Drafter.NONE, Drafter.NGRAM, Drafter.MODEL]
    async with toy_cluster(
        prepare=lambda cluster: (
            cluster.add_target(runner=LogitRunner(model)),
            cluster.add_draft(runner=LogitRunner(LogitToy(noise=1.0))),
        )
    ) as cluster:
        accepted = dict.fromkeys(drafters, 0)
        for item in [request for t in TEMPERATURES for request in submissions(name, t)[:3]]:
            right = model.output(item)
            for drafter in drafters:
                request = GenerateRequest(
                    f"{item.request_id}-{drafter}-{item.sampling.temperature}",
                    MODEL,
                    item.prompt_token_ids,
                    item.sampling,
                    speculation=SpeculationOverride(drafter is not Drafter.NONE, DRAFT_LEN, drafter),
                )
                deltas = await collect(cluster.router, request)
                assert tokens_of(deltas) == right
                assert deltas[-1].stats is not None
                accepted[drafter] += deltas[-1].stats.num_accepted_tokens
        assert accepted[Drafter.NONE] == 0
        assert accepted[Drafter.MODEL] > 0


# --- stop strings ----------------------------------------------------------------------------------------------------

TEXT = LogitToy(vocab_size=94)  # the byte tokenizer's first ids are the printable characters


def cut_at(text: str, stop: str, min_tokens: int) -> str:
    """The text before the first stop string that ends at the min_tokens-th character or later."""
    ends = [end for end in range(max(min_tokens, len(stop)), len(text) + 1) if text[:end].endswith(stop)]
    return text[: ends[0] - len(stop)] if ends else text


async def test_a_stop_string_ends_at_every_offset_of_a_window_and_never_before_min_tokens() -> None:
    tokenizer = byte_tokenizer()
    free = submit(temperature=1.0, ignore_eos=True, max_tokens=20)
    text = tokenizer.decode(TEXT.output(free))
    async with toy_cluster(
        prepare=lambda cluster: (
            cluster.add_target(runner=LogitRunner(TEXT)),
            cluster.add_draft(runner=LogitRunner(TEXT)),
        )
    ) as cluster:
        for end, min_tokens in itertools.product(range(1, 14), (0, 5, 20)):
            stop = text[max(0, end - 2) : end]
            params = replace(free.sampling, stop=(stop,), min_tokens=min_tokens, num_logprobs=0)
            request = GenerateRequest(f"{end}-{min_tokens}", MODEL, free.prompt_token_ids, params)
            deltas = await collect(cluster.router, request)
            expected = cut_at(text, stop, min_tokens)
            assert "".join(delta.text for delta in deltas) == expected
            num_tokens = len(expected) if expected == text else len(expected) + len(stop)
            assert tokens_of(deltas) == TEXT.output(free)[:num_tokens]
            assert sum(len(delta.logprobs or ()) for delta in deltas) == num_tokens >= min(min_tokens, 20)
            assert deltas[-1].stop_reason == (None if expected == text else stop)
        await cluster.until(cluster.is_free)
        assert all(host.pool.engine.faults.total == 0 for host in cluster.hosts.values())
