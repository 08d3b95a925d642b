"""The running cluster through the real `openai` client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, RateLimitError

from tests.e2e.cluster import MODEL, Cluster, wait_until

pytestmark = pytest.mark.e2e

PROMPT = [{"role": "user", "content": "Give me three tips about gardening."}]


async def streamed(client: AsyncOpenAI, **fields: Any) -> tuple[str, str | None, Any]:
    """Text, finish_reason and usage of a streamed chat completion."""
    settings = {"model": MODEL, "messages": PROMPT, "max_tokens": 40, "temperature": 0, **fields}
    text, finish, usage = "", None, None
    stream = await client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **settings)
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish, usage


async def whole(client: AsyncOpenAI, **fields: Any) -> Any:
    settings = {"model": MODEL, "messages": PROMPT, "max_tokens": 40, "temperature": 0, **fields}
    return await client.chat.completions.create(**settings)


async def test_a_stream_says_what_the_whole_answer_says(client: AsyncOpenAI) -> None:
    text, finish, usage = await streamed(client)
    answer = await whole(client)
    assert text == answer.choices[0].message.content
    assert finish == answer.choices[0].finish_reason == "length"
    assert usage.completion_tokens == answer.usage.completion_tokens == 40
    assert usage.prompt_tokens == answer.usage.prompt_tokens > 10


async def test_usage_counts_the_emitted_tokens(client: AsyncOpenAI) -> None:
    answer = await whole(client, logprobs=True, max_tokens=23)
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens == 23


async def test_a_stop_string_cuts_the_text_and_is_not_shown(client: AsyncOpenAI) -> None:
    full, _, _ = await streamed(client, max_tokens=60)
    stop = full[30:36]
    text, finish, _ = await streamed(client, max_tokens=60, stop=[stop])
    assert finish == "stop"
    assert text == full[: full.index(stop)]


async def test_a_seed_repeats_a_sampled_answer_and_another_seed_does_not(client: AsyncOpenAI) -> None:
    fields = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 30}
    first, _, _ = await streamed(client, seed=11, **fields)
    again, _, _ = await streamed(client, seed=11, **fields)
    other, _, _ = await streamed(client, seed=12, **fields)
    assert first == again != other


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", ["model", "ngram"])
async def test_speculation_changes_no_text(client: AsyncOpenAI, temperature: float, drafter: str) -> None:
    fields = {"temperature": temperature, "seed": 5, "max_tokens": 48}
    plain = await whole(client, extra_body={"speculation": {"enabled": False}}, **fields)
    speculative = await whole(client, extra_body={"speculation": {"enabled": True, "drafter": drafter}}, **fields)
    assert speculative.choices[0].message.content == plain.choices[0].message.content


async def test_an_answer_and_its_stream_say_which_policy_they_followed(client: AsyncOpenAI, cluster: Cluster) -> None:
    for is_stream in (False, True):
        answer = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=PROMPT, max_tokens=2, stream=is_stream, user="alice"
        )
        assert answer.headers["x-paceline-variant"] == "default"
        assert answer.headers["x-paceline-policy-version"] == str(cluster.status()["policy_version"])


async def test_the_draft_pool_really_guesses(client: AsyncOpenAI, cluster: Cluster) -> None:
    before = cluster.pool_samples()["paceline_spec_decode_num_accepted_tokens_total"]
    await whole(client, extra_body={"speculation": {"drafter": "model"}})
    assert cluster.pool_samples()["paceline_spec_decode_num_accepted_tokens_total"] > before


async def test_a_client_that_goes_away_frees_both_pools(client: AsyncOpenAI, cluster: Cluster) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=PROMPT, max_tokens=1500, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    assert not cluster.is_idle()
    await stream.close()
    wait_until(cluster.is_idle, 2.0, "freeing a cancelled request's blocks in both pools")


async def test_completions_take_text_and_token_ids(client: AsyncOpenAI) -> None:
    text = await client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, temperature=0)
    assert text.choices[0].finish_reason == "length"
    assert text.usage is not None
    assert text.usage.completion_tokens == 8


async def test_models_are_listed(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]


async def test_bad_requests_are_told_what_is_wrong_and_the_server_serves_on(client: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match="temperature") as refused:
        await whole(client, temperature=9)
    assert refused.value.param == "temperature"
    with pytest.raises(NotFoundError, match="no-such-model"):
        await whole(client, model="no-such-model")
    with pytest.raises(BadRequestError, match="2048") as too_long:
        await client.completions.create(model=MODEL, prompt=[7] * 2100, max_tokens=8)
    assert too_long.value.code == "context_length_exceeded"
    assert (await whole(client, max_tokens=2)).usage.completion_tokens == 2


async def test_a_tenant_beyond_its_queue_is_told_to_come_back(client: AsyncOpenAI, cluster: Cluster) -> None:
    headers = {"X-Paceline-Tenant": "flood"}
    calls = [whole(client, max_tokens=8, extra_headers=headers) for _ in range(60)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, RateLimitError)]
    served = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert len(refused) + len(served) == 60
    assert served
    assert refused
    assert int(refused[0].response.headers["retry-after"]) >= 1
    wait_until(cluster.is_idle, 5.0, "idleness after a flood")


async def test_an_operator_sees_requests_by_tenant(client: AsyncOpenAI, cluster: Cluster) -> None:
    await whole(client, max_tokens=2, extra_headers={"X-Paceline-Tenant": "acme", "X-Paceline-Workload": "chat"})
    labels = 'model="smollm2-135m",tenant="acme",workload="chat"'
    assert f"paceline_time_to_first_token_seconds_count{{{labels}}} 1.0" in cluster.router_metrics()


async def test_a_second_turn_finds_the_first_in_the_prefix_cache_of_its_tenant_only(
    client: AsyncOpenAI, cluster: Cluster
) -> None:
    opening = {"role": "user", "content": "Write two sentences about a lighthouse, a storm and the keeper's old dog."}
    headers = {"X-Paceline-Tenant": "keeper"}
    first = await whole(client, messages=[opening], extra_headers=headers)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    turn = [opening, said, {"role": "user", "content": "Now one more."}]
    _, _, second = await streamed(client, messages=turn, extra_headers=headers)
    full_blocks = (first.usage.prompt_tokens + first.usage.completion_tokens - 1) // 16
    assert full_blocks >= 4
    assert 0.95 * 16 * full_blocks <= second.prompt_tokens_details.cached_tokens < second.prompt_tokens
    stranger = await whole(client, messages=turn, extra_headers={"X-Paceline-Tenant": "stranger"})
    assert stranger.usage.prompt_tokens_details.cached_tokens == 0
    assert cluster.pool_samples()["paceline_prefix_cache_hits_total"] >= second.prompt_tokens_details.cached_tokens
    wait_until(cluster.is_idle, 5.0, "idle cached blocks that count as free")
