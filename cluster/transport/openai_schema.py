"""Request bodies of the OpenAI-compatible API.

A field of OpenAI's API is either implemented, or a harmless hint that is accepted and ignored, or refused by name
unless it has a value that asks for nothing. A field that is not declared here is unknown and refused too.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from cluster.messages.request import Grammar
from cluster.transport.structured_output import parse_response_format, parse_structured_outputs
from cluster.transport.validation import MAX_LOGPROBS, Constraint, GenerationFields, StrictFields, only

MAX_PROMPTS = 64
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

_TOOLS = only(None, [], reason="Tools are not supported; response_format binds an answer to JSON")


class StreamOptions(StrictFields):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: ignored


class OpenAIFields(GenerationFields):
    """What both endpoints share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Annotated[Grammar | None, BeforeValidator(parse_response_format)] = None
    structured_outputs: Annotated[Grammar | None, BeforeValidator(parse_structured_outputs)] = None
    user: str | None = None
    # hints that change nothing here
    metadata: dict[str, str] | None = None
    service_tier: str | None = None

    @model_validator(mode="after")
    def _one_grammar(self) -> Self:
        if None not in (self.response_format, self.structured_outputs):
            raise _conflict("structured_outputs", "It cannot be used together with response_format")
        return self

    @property
    def constraint(self) -> Constraint | None:
        if self.response_format is not None:
            return Constraint(self.response_format, "response_format")
        return None if self.structured_outputs is None else Constraint(self.structured_outputs, "structured_outputs")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def _unsupported(param: str, reason: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", "{reason}", {"reason": reason, "param": param})


def _conflict(param: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("conflict", "{message}", {"message": message, "param": param})


# --- chat ------------------------------------------------------------------------------------------------------------


def _content_text(value: object) -> object:
    """A message's content as one string: a string, or a list of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "Input should be a string or a list of text parts")
    return "".join(_part_text(part) for part in value)


def _part_text(part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise PydanticCustomError("unsupported", "Only text parts are supported")
    if not isinstance(part.get("text"), str) or not part.keys() <= {"type", "text", "prompt_cache_breakpoint"}:
        raise PydanticCustomError("content", "A text part should have a type and a text that is a string")
    return str(part["text"])


class Message(StrictFields):
    """One message; the fields of an earlier answer are accepted as long as they hold nothing but text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content_text)]
    name: Annotated[str, Field(max_length=64)] | None = None
    refusal: Annotated[object, only(None, reason="Refusals are not supported")] = None
    annotations: Annotated[object, only(None, [], reason="Annotations are not supported")] = None
    audio: Annotated[object, only(None, reason="Audio is not supported")] = None
    tool_calls: Annotated[object, _TOOLS] = None
    function_call: Annotated[object, only(None, reason="Functions are not supported")] = None

    def for_template(self) -> dict[str, str]:
        """What the model's chat template sees; it knows `developer` by its older name."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content} | ({} if self.name is None else {"name": self.name})


class ChatCompletionRequest(OpenAIFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    # hints that change nothing here
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, str] | None = None
    safety_identifier: str | None = None
    # not supported
    store: Annotated[object, only(None, False, reason="Completions are not stored")] = None
    tools: Annotated[object, _TOOLS] = None
    tool_choice: Annotated[object, only(None, "none", "auto", reason="Tools are not supported")] = None
    parallel_tool_calls: Annotated[object, only(None, reason="Tools are not supported")] = None
    functions: Annotated[object, only(None, [], reason="Functions are not supported")] = None
    function_call: Annotated[object, only(None, "none", "auto", reason="Functions are not supported")] = None
    modalities: Annotated[object, only(None, ["text"], reason="Only ['text'] is supported")] = None
    audio: Annotated[object, only(None, reason="Audio is not supported")] = None
    prediction: Annotated[object, only(None, reason="Predicted outputs are not supported")] = None
    reasoning_effort: Annotated[object, only(None, "none", reason="Reasoning effort is not supported")] = None
    verbosity: Annotated[object, only(None, "medium", reason="Only medium verbosity is supported")] = None
    web_search_options: Annotated[object, only(None, reason="Web search is not supported")] = None
    moderation: Annotated[object, only(None, reason="Moderation is not supported")] = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise _conflict("top_logprobs", "It needs logprobs to be true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise _conflict("max_tokens", "It differs from max_completion_tokens; give one of them")
        return self

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> list[dict[str, str]]:
        return [message.for_template() for message in self.messages]


# --- completions -----------------------------------------------------------------------------------------------------

Prompt = str | tuple[int, ...]


def _prompts(value: object) -> object:
    """A string, a list of token ids, or a list of either, as a tuple of prompts."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("prompt", "Input should be a string, a list of token ids, or a list of either")
    prompts = (tuple(value),) if _is_token_ids(value) else tuple(map(_one_prompt, value))
    if len(prompts) > MAX_PROMPTS:
        raise PydanticCustomError("prompt", "At most {limit} prompts are allowed", {"limit": MAX_PROMPTS})
    return prompts


def _one_prompt(value: object) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and _is_token_ids(value):
        return tuple(value)
    raise PydanticCustomError("prompt", "Each prompt should be a string or a list of token ids")


def _is_token_ids(value: list[object]) -> bool:
    return all(type(item) is int for item in value)


class CompletionRequest(OpenAIFields):
    """Body of POST /v1/completions."""

    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    # not supported
    suffix: Annotated[object, only(None, "", reason="Insertion before a suffix is not supported")] = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.best_of not in (None, self.num_choices):
            raise _unsupported("best_of", "Choosing among outputs is not supported; only the value of n is accepted")
        if self.echo and self.logprobs is not None:
            raise _unsupported("echo", "Log-probabilities of a prompt are not supported; leave out echo or logprobs")
        if len(self.prompt) * self.num_choices > MAX_PROMPTS:
            raise _conflict("n", f"At most {MAX_PROMPTS} choices are allowed for all prompts together")
        return self

    @property
    def default_max_tokens(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs
