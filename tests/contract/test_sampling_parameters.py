"""Sampling parameters from the real `openai` client to the sampler and back: API, router, engines, no model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from cluster.core.keyed_noise import choice_seed
from cluster.messages.rounds import Submit
from protos.paceline.v1 import inference_pb2 as pb
from tests.contract.api_server import openai_client
from tests.contract.grpc_server import inference_stub
from tests.fakes import FakeBackend, byte_tokenizer, sampling
from tests.logit_engines import LogitRunner, LogitToy
from tests.toy_cluster import MODEL, ToyCluster, toy_cluster

pytestmark = pytest.mark.contract

TOKENIZER = byte_tokenizer()
TOY = LogitToy(vocab_size=TOKENIZER.vocab_size, loop=3, pull=4.0)
HI = [{"role": "user", "content": "hi"}]
HI_TOKENS = TOKENIZER.apply_chat_template(HI)


@asynccontextmanager
async def client_of_toys() -> AsyncIterator[AsyncOpenAI]:
    """The client of a router with a target and a draft that often disagree."""

    def prepare(cluster: ToyCluster) -> None:
        cluster.add_target(runner=LogitRunner(TOY))
        cluster.add_draft(runner=LogitRunner(LogitToy(TOY.vocab_size, loop=3, pull=4.0, noise=1.0)))

    async with toy_cluster(prepare=prepare) as cluster, openai_client(cluster.router) as client:
        yield client


def right_text(prompt: tuple[int, ...] = HI_TOKENS, **fields: Any) -> str:
    return TOKENIZER.decode(TOY.output(Submit("r", prompt, sampling(**{"max_tokens": 20, "seed": 5, **fields}))))


async def chat(client: AsyncOpenAI, **fields: Any) -> Any:
    return await client.chat.completions.create(
        **{"model": MODEL, "messages": HI, "max_tokens": 20, "seed": 5, **fields}
    )


# --- parameters that change logits -----------------------------------------------------------------------------------

PARAMETERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    ({"frequency_penalty": 0.8}, {"frequency_penalty": 0.8}),
    ({"extra_body": {"repetition_penalty": 1.4}}, {"repetition_penalty": 1.4}),
    ({"logit_bias": {"11": -100, "42": 4.5}}, {"logit_bias": ((11, -100.0), (42, 4.5))}),
    ({"logit_bias": {"0": 8}, "extra_body": {"min_tokens": 7}}, {"logit_bias": ((0, 8.0),), "min_tokens": 7}),
    (
        {"extra_body": {"stop_token_ids": [10, 12], "min_tokens": 5}},
        {"stop_token_ids": (10, 12), "min_tokens": 5},
    ),
]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize(("sent", "meant"), PARAMETERS, ids=str)
async def test_a_parameter_gives_the_reference_samplers_text_with_speculation_on_and_off(
    sent: dict[str, Any], meant: dict[str, Any], temperature: float
) -> None:
    expected = right_text(temperature=temperature, **meant)
    assert expected != right_text(temperature=temperature)
    async with client_of_toys() as client:
        for speculation in ({"enabled": False}, {"drafter": "ngram"}, {"drafter": "model", "max_draft_tokens": 3}):
            body = {**sent.get("extra_body", {}), "speculation": speculation}
            answer = await chat(client, **{**sent, "extra_body": body}, temperature=temperature)
            assert answer.choices[0].message.content == expected


async def test_a_banned_token_is_not_in_the_text_and_a_wanted_one_is_nothing_else() -> None:
    async with client_of_toys() as client:
        banned = await chat(client, logit_bias={str(token_id): -100 for token_id in range(10, 13)})
        assert not set(TOKENIZER.decode(range(10, 13))) & set(banned.choices[0].message.content)
        wanted = await chat(client, logit_bias={"65": 100})
        assert wanted.choices[0].message.content == TOKENIZER.decode([65]) * 20


async def test_log_probabilities_are_the_models_own_whatever_is_added_to_its_logits() -> None:
    async with client_of_toys() as client:
        free = await chat(client, logprobs=True, top_logprobs=3, max_tokens=1, temperature=0)
        biased = await chat(client, logprobs=True, top_logprobs=3, max_tokens=1, temperature=0, logit_bias={"65": 100})
    [one], [other] = free.choices[0].logprobs.content, biased.choices[0].logprobs.content
    assert other.token == TOKENIZER.decode([65])
    assert other.top_logprobs == one.top_logprobs
    assert other.logprob < one.logprob - 1


# --- n ---------------------------------------------------------------------------------------------------------------


def choice_texts(n: int, prompt: tuple[int, ...] = HI_TOKENS) -> list[str]:
    return [right_text(prompt, seed=choice_seed(5, index)) for index in range(n)]


async def test_n_choices_have_their_own_seeds_and_the_prompt_is_counted_once() -> None:
    async with client_of_toys() as client:
        answer = await chat(client, n=4, logprobs=True)
        alone = await chat(client)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.message.content for choice in answer.choices]
    assert texts == choice_texts(4)
    assert len(set(texts)) == 4
    assert texts[0] == alone.choices[0].message.content
    assert answer.usage.prompt_tokens == len(HI_TOKENS)
    assert answer.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in answer.choices)


async def test_streamed_choices_are_told_apart_by_their_index() -> None:
    async with client_of_toys() as client:
        stream = await chat(client, n=8, stream=True, stream_options={"include_usage": True})
        *chunks, last = [chunk async for chunk in stream]
    texts = choice_texts(8)
    for index, text in enumerate(texts):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == text
        assert [choice.delta.role for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert [choice.finish_reason is None for choice in mine] == [True] * (len(mine) - 1) + [False]
    assert len(chunks) == sum(1 for chunk in chunks if chunk.choices[0].index < 8)
    assert last.choices == []
    assert last.usage.prompt_tokens == len(HI_TOKENS)


async def test_choices_of_several_prompts_come_prompt_by_prompt() -> None:
    async with client_of_toys() as client:
        answer = await client.completions.create(
            model=MODEL, prompt=["ab", "xyz"], n=3, best_of=3, max_tokens=20, seed=5
        )
    assert [choice.index for choice in answer.choices] == list(range(6))
    expected = [text for prompt in ("ab", "xyz") for text in choice_texts(3, TOKENIZER.encode(prompt))]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5


async def test_a_failing_choice_fails_the_answer_and_closes_the_others() -> None:
    backend = FakeBackend(script=("a", ValueError("broken")))
    async with openai_client(backend) as client:
        with pytest.raises(Exception, match="Internal error"):
            await client.chat.completions.create(model="demo", messages=HI, n=3)
    assert backend.closed.qsize() == 3


async def test_grpc_choices_have_an_index_and_each_a_last_message() -> None:
    def prepare(cluster: ToyCluster) -> None:
        cluster.add_target(runner=LogitRunner(TOY))

    async with toy_cluster(prepare=prepare) as cluster, inference_stub(cluster.router) as stub:
        request = pb.GenerateRequest(
            model=MODEL, text="ab", n=3, seed=5, max_tokens=20, logit_bias={11: -100}, presence_penalty=0.5,
            frequency_penalty=0.25, repetition_penalty=1.1, min_tokens=9, stop_token_ids=[30],
        )  # fmt: skip
        responses = [response async for response in stub.Generate(request)]
    fields: dict[str, Any] = {"logit_bias": ((11, -100.0),), "presence_penalty": 0.5, "frequency_penalty": 0.25}
    fields |= {"repetition_penalty": 1.1, "min_tokens": 9, "stop_token_ids": (30,)}
    for index in range(3):
        mine = [response for response in responses if response.index == index]
        expected = right_text(TOKENIZER.encode("ab"), **{**fields, "seed": choice_seed(5, index)})
        assert "".join(response.text for response in mine) == expected
        assert [bool(response.finish_reason) for response in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].usage.prompt_tokens == 2
        assert mine[-1].usage.completion_tokens == sum(len(response.token_ids) for response in mine)


# --- echo ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["once upon", list(TOKENIZER.encode("once upon"))], ids=["text", "token ids"])
async def test_echo_puts_the_prompt_before_each_text(prompt: Any) -> None:
    async with client_of_toys() as client:
        fields = {"model": MODEL, "prompt": prompt, "n": 2, "echo": True, "max_tokens": 20, "seed": 5}
        answer = await client.completions.create(**fields)
        chunks = [chunk async for chunk in await client.completions.create(**fields, stream=True)]
    expected = ["once upon" + text for text in choice_texts(2, TOKENIZER.encode("once upon"))]
    assert [choice.text for choice in answer.choices] == expected
    for index in (0, 1):
        mine = [chunk.choices[0].text for chunk in chunks if chunk.choices[0].index == index]
        assert mine[0] == "once upon"
        assert "".join(mine) == expected[index]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 9


async def test_a_stop_string_in_an_echoed_prompt_ends_nothing() -> None:
    async with openai_client(FakeBackend()) as client:
        answer = await client.completions.create(model="demo", prompt="no stop", stop=" stop", echo=True)
        assert answer.choices[0].text == "no stopHello, world!"
        with pytest.raises(BadRequestError, match="leave out echo or logprobs"):
            await client.completions.create(model="demo", prompt="x", echo=True, logprobs=1)
