"""The one place where a request's values are checked: everything behind it may rely on their ranges.

HTTP and gRPC differ in how a request arrives; both parse it into a subclass of `GenerationFields`, which owns the
ranges, and what is checked becomes a `GenerateRequest` in `prompts.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from cluster.messages.answer import ErrorKind, RequestError
from cluster.messages.request import MAX_DRAFT_TOKENS, Drafter, Grammar, SamplingParams, SpeculationOverride
from cluster.transport.logit_bias import parse_logit_bias

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_PENALTY = 2.0
REPETITION_PENALTIES = (0.01, 10.0)
MAX_CHOICES = 8  # of one prompt
MAX_TIMEOUT_S = 86_400.0


class InvalidCode(StrEnum):
    """What exactly is wrong with a request that is answered INVALID; HTTP errors carry it as `code`."""

    JSON = "invalid_json"
    MISSING = "missing_required_parameter"
    UNKNOWN = "unknown_parameter"
    UNSUPPORTED = "unsupported_parameter"
    VALUE = "invalid_value"


class InvalidRequest(RequestError):
    """A request with a field that cannot be accepted as it is."""

    def __init__(self, message: str, param: str | None = None, code: InvalidCode = InvalidCode.VALUE) -> None:
        super().__init__(ErrorKind.INVALID, message, param)
        self.code = code


# --- fields ----------------------------------------------------------------------------------------------------------


class StrictFields(BaseModel):
    """Base of everything parsed from a client: no unknown fields, no coercion, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def only(*allowed: object, reason: str) -> BeforeValidator:
    """Accept a field that Paceline does not implement only with values that ask for nothing."""

    def check(value: object) -> object:
        if any(type(value) is type(item) and value == item for item in allowed):
            return value
        raise PydanticCustomError("unsupported", "{reason}", {"reason": reason})

    return BeforeValidator(check)


def _stop_strings(value: object) -> object:
    """A string, a list of strings, or nothing, as a tuple."""
    items = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise PydanticCustomError("stop", "Input should be a string or a list of strings")
    if len(items) > MAX_STOP_STRINGS:
        raise PydanticCustomError("stop", "At most {limit} stop strings are allowed", {"limit": MAX_STOP_STRINGS})
    if not all(0 < len(item) <= MAX_STOP_CHARS for item in items):
        raise PydanticCustomError("stop", "Stop strings should have 1 to {limit} characters", {"limit": MAX_STOP_CHARS})
    return tuple(dict.fromkeys(items))


Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class SpeculationFields(StrictFields):
    """What one request asks of speculation."""

    enabled: bool | None = None
    max_draft_tokens: Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)] | None = None
    drafter: Annotated[Drafter, Field(strict=False)] | None = None

    def override(self) -> SpeculationOverride:
        return SpeculationOverride(self.enabled, self.max_draft_tokens, self.drafter)


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the output must look like, and the field that says so."""

    grammar: Grammar
    param: str


class GenerationFields(StrictFields):
    """What every way of asking for text has in common; None leaves the default."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop_strings)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])] | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(parse_logit_bias)] = ()
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    ignore_eos: bool | None = None
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    speculation: SpeculationFields | None = None

    @property
    def default_max_tokens(self) -> int | None:
        """Output limit of a request that names none; None: whatever the context leaves."""
        return None

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """As in SamplingParams."""
        return None

    @property
    def constraint(self) -> Constraint | None:
        """None for a request that takes any output."""
        return None

    @property
    def num_choices(self) -> int:
        """Outputs of each prompt."""
        return self.n or 1

    def sampling(self, max_tokens: int) -> SamplingParams:
        """The checked sampling parameters; a request without a seed gets a random one."""
        return SamplingParams(
            max_tokens=max_tokens,
            seed=secrets.randbits(64) if self.seed is None else self.seed % 2**64,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k,
            min_p=self.min_p or 0.0,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            num_logprobs=self.num_logprobs,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=self.logit_bias,
            min_tokens=self.min_tokens or 0,
            grammar=None if self.constraint is None else self.constraint.grammar,
        )


# --- parsing ---------------------------------------------------------------------------------------------------------

Fields = TypeVar("Fields", bound=StrictFields)

_CODES = {
    "missing": InvalidCode.MISSING,
    "extra_forbidden": InvalidCode.UNKNOWN,
    "json_invalid": InvalidCode.JSON,
    "unsupported": InvalidCode.UNSUPPORTED,
}


def parse_json(fields: type[Fields], body: bytes) -> Fields:
    """Raises InvalidRequest naming the first offending field."""
    try:
        return fields.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error) from error


def parse_values(fields: type[Fields], values: Mapping[str, object]) -> Fields:
    """Raises InvalidRequest naming the first offending field."""
    try:
        return fields.model_validate(dict(values))
    except ValidationError as error:
        raise invalid(error) from error


def invalid(error: ValidationError) -> InvalidRequest:
    """The first error of several as the client sees it, with the number of the others."""
    first, *others = error.errors(include_url=False, include_input=False)
    param = _path(first["loc"]) or first.get("ctx", {}).get("param")
    code = _CODES.get(first["type"], InvalidCode.VALUE)
    message = f"{param}: {_explain(first, code)}" if param else _explain(first, code)
    return InvalidRequest(message + (f" (errors in all: {len(others) + 1})" if others else ""), param, code)


def _explain(error: ErrorDetails, code: InvalidCode) -> str:
    if code is InvalidCode.UNKNOWN:
        return "Unrecognized request argument"
    return "Missing required parameter" if code is InvalidCode.MISSING else error["msg"]


def _path(location: Iterable[int | str]) -> str:
    """`messages[0].content`; a client's own over-long key is cut."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part[:64]}" for part in location)
    return "".join(parts).removeprefix(".")


# --- context and request ---------------------------------------------------------------------------------------------


def output_limit(fields: GenerationFields, prompt_len: int, max_model_len: int, param: str) -> int:
    """How many tokens a request may produce, in 1 … max_model_len − prompt_len.

    Raises RequestError(CONTEXT_LENGTH) with the prompt's length and the model's limit.
    """
    left = max_model_len - prompt_len
    limit = f"This model's maximum context length is {max_model_len} tokens, but the prompt has {prompt_len} tokens"
    if left < 1:
        raise RequestError(ErrorKind.CONTEXT_LENGTH, f"{limit}, which leaves none for the output", param)
    requested = fields.requested_max_tokens
    if requested is None:
        return min(left, fields.default_max_tokens or left)
    if requested > left:
        raise RequestError(ErrorKind.CONTEXT_LENGTH, f"{limit} and {requested} output tokens were requested", param)
    return requested


def check_against_output(fields: GenerationFields, max_tokens: int, vocab_size: int) -> None:
    """Raises InvalidRequest for what is in range by itself, but not for this output and vocabulary."""
    if fields.min_tokens is not None and fields.min_tokens > max_tokens:
        message = f"min_tokens: {fields.min_tokens} tokens are more than the output's limit of {max_tokens}"
        raise InvalidRequest(message, "min_tokens")
    if fields.constraint is not None:
        _check_beside_grammar(fields, fields.constraint.param)
    if any(token_id >= vocab_size for token_id, _ in fields.logit_bias):
        raise InvalidRequest(f"logit_bias: token ids should be between 0 and {vocab_size - 1}", "logit_bias")


def _check_beside_grammar(fields: GenerationFields, param: str) -> None:
    """What could leave a grammar without a token to choose, or ask for tokens after its end."""
    if fields.ignore_eos:
        raise InvalidRequest(f"ignore_eos: nothing can follow the end of a {param}", "ignore_eos")
    if fields.min_tokens and fields.stop_token_ids:
        message = f"min_tokens: not together with stop_token_ids and {param}, which might allow stop tokens only"
        raise InvalidRequest(message, "min_tokens")
