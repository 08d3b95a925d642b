"""JSON that must parse and validate, from the demo model, through the real `openai` client."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI, BadRequestError

from protos.paceline.v1 import common_pb2, inference_pb2
from tests.e2e.cluster import MODEL, Cluster, wait_until

pytestmark = pytest.mark.e2e

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "hobbies": {"type": "array", "items": {"enum": ["chess", "music", "running"]}, "maxItems": 3},
    },
    "required": ["name", "age", "hobbies"],
    "additionalProperties": False,
}
PROMPT = [{"role": "user", "content": "Tom is 7 years old. He likes music. Answer with JSON: name, age, hobbies."}]
OFF: dict[str, Any] = {"enabled": False}
ON: list[dict[str, Any]] = [{"drafter": "model"}, {"drafter": "ngram"}, {"drafter": "model", "max_draft_tokens": 1}]


async def answer(client: AsyncOpenAI, speculation: dict[str, Any], **fields: Any) -> Any:
    body = {"speculation": speculation, **fields.pop("extra_body", {})}
    settings = {"model": MODEL, "messages": PROMPT, "max_tokens": 120, "seed": 3, **fields}
    return (await client.chat.completions.create(extra_body=body, **settings)).choices[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_json_follows_its_schema_and_is_the_same_with_and_without_speculation(
    client: AsyncOpenAI, cluster: Cluster, temperature: float
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    plain = await answer(client, OFF, response_format=form, temperature=temperature)
    assert plain.finish_reason == "stop"
    jsonschema.validate(json.loads(plain.message.content), PERSON)
    for speculation in ON:
        choice = await answer(client, speculation, response_format=form, temperature=temperature)
        assert choice.message.content == plain.message.content
        assert choice.finish_reason == "stop"
    wait_until(cluster.is_idle, 2.0, "freeing both pools")


async def test_the_draft_pool_guesses_inside_a_grammar(client: AsyncOpenAI, cluster: Cluster) -> None:
    def num_accepted() -> float:
        return cluster.pool_samples()["paceline_spec_decode_num_accepted_tokens_total"]

    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    await answer(client, ON[0], response_format=form, temperature=0)  # both replicas have compiled it now
    before = num_accepted()
    await answer(client, ON[0], response_format=form, temperature=0)
    assert num_accepted() > before + 5


async def test_a_regular_expression_and_a_choice_bind_completions_too(client: AsyncOpenAI) -> None:
    for form, pattern in (
        ({"regex": r"[0-9]{4}-[0-9]{2}-[0-9]{2}"}, r"\d{4}-\d\d-\d\d"),
        ({"choice": ["yes, (of course)", "no"]}, r"yes, \(of course\)|no"),
    ):
        texts = set()
        for speculation in (OFF, ON[0]):
            body = {"speculation": speculation, "structured_outputs": form}
            completion = await client.completions.create(model=MODEL, prompt="Today is", temperature=0, extra_body=body)
            texts.add(completion.choices[0].text)
            assert completion.choices[0].finish_reason == "stop"
        assert re.fullmatch(pattern, *texts)


async def test_json_mode_gives_one_object(client: AsyncOpenAI) -> None:
    choice = await answer(client, ON[0], response_format={"type": "json_object"}, temperature=0, max_tokens=300)
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    else:
        assert choice.message.content.startswith("{")


async def test_a_bad_schema_is_refused_by_name_and_the_server_serves_on(client: AsyncOpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
    with pytest.raises(BadRequestError, match="strin") as refused:
        await answer(client, OFF, response_format=form)
    assert refused.value.param == "response_format"
    assert (await answer(client, OFF, max_tokens=2)).finish_reason == "length"


async def test_grpc_takes_a_grammar(stub: Any) -> None:
    grammar = common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_REGEX, source="(red|green|blue)")
    request = inference_pb2.GenerateRequest(model=MODEL, text="The sky is", grammar=grammar, temperature=0)
    text = "".join([response.text async for response in stub.Generate(request)])
    assert text in ("red", "green", "blue")
