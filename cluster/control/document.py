"""The policy document: what operators write down about speculation. Frozen, bounded, checked whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from cluster.control.flaws import DocumentError as DocumentError  # re-exported: what parse_document raises
from cluster.control.flaws import Flaw as Flaw
from cluster.control.strict_document import StrictModel, parse
from cluster.messages.request import MAX_DRAFT_TOKENS, AcceptanceRule, Drafter

SCHEMA: Final = "paceline.policy/v1"
MAX_RULES: Final = 1000
MAX_NAME_CHARS: Final = 128
MAX_NAMES: Final = 1000  # in one list
CANARY: Final = "canary"
CONTROL: Final = "control"
DEFAULT: Final = "default"
OFF: Final = "off"
RESERVED_VARIANTS: Final = (CONTROL, DEFAULT, OFF)  # what evaluate itself calls those that no rule lets in


class TargetingKey(StrEnum):
    """Whose requests stay together: all requests of one key have one bucket. Without such a key: the request's id."""

    USER = "user"
    SESSION = "session"
    TENANT = "tenant"


class RuleAction(StrEnum):
    """What a rule does about the requests that it matches."""

    ALLOW = "allow"
    DENY = "deny"


class ControlArm(StrEnum):
    """What requests outside an allow rule's percentage get."""

    DEFAULT = "default"  # what they would get without the rule: the document's default
    PLAIN = "plain"  # no speculation


def _printable(value: str) -> str:
    if not value.isprintable():
        raise PydanticCustomError("name", "should have printable characters only")
    return value


def _two_decimals(value: float) -> float:
    if round(value, 2) != value:
        raise PydanticCustomError("percent", "has more than two decimals", {"limit": "steps of 0.01"})
    return value


def _guesses(value: Drafter) -> Drafter:
    """Off is said by `enabled: false` and by deny rules alone."""
    if value is Drafter.NONE:
        raise PydanticCustomError("drafter", "none is not a drafter", {"limit": "one of auto, model, ngram"})
    return value


Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS), AfterValidator(_printable)]
Names = Annotated[tuple[Name, ...], Field(min_length=1, max_length=MAX_NAMES)]
Label = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS, pattern=r"^[A-Za-z0-9._-]+$")]
Percent = Annotated[float, Field(ge=0, le=100), AfterValidator(_two_decimals)]
DraftTokens = Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)]
Temperature = Annotated[float, Field(ge=0, le=2)]
TokenCount = Annotated[int, Field(ge=0, lt=2**31)]
AnyDrafter = Annotated[Drafter, AfterValidator(_guesses)]


def _check_order(low: float | None, high: float | None) -> None:
    if low is None and high is None:
        raise PydanticCustomError("range", "should have min, max or both")
    if low is not None and high is not None and low > high:
        raise PydanticCustomError("range", "should not be above max", {"at": ".min", "limit": f"at most {high:g}"})


class TemperatureRange(StrictModel):
    """Both ends belong to it."""

    min: Temperature | None = None
    max: Temperature | None = None

    @model_validator(mode="after")
    def _is_range(self) -> Self:
        _check_order(self.min, self.max)
        return self


class TokenRange(StrictModel):
    """Both ends belong to it."""

    min: TokenCount | None = None
    max: TokenCount | None = None

    @model_validator(mode="after")
    def _is_range(self) -> Self:
        _check_order(self.min, self.max)
        return self


class Match(StrictModel):
    """All that is given must hold; a list holds when it has the request's value. Nothing given: every request."""

    models: Names | None = None
    tenants: Names | None = None
    workloads: Names | None = None
    key_labels: Names | None = None
    draft_versions: Names | None = None
    temperature: TemperatureRange | None = None
    prompt_tokens: TokenRange | None = None


class Effect(StrictModel):
    """What an allow rule sets for those it lets in; what it leaves out is the default's, or the request's to choose."""

    drafter: AnyDrafter | None = None
    max_draft_tokens: DraftTokens | None = None
    acceptance: AcceptanceRule | None = None


class Rule(StrictModel):
    """One rule; `percent`, `variant`, `control` and `effect` are for allow rules."""

    id: Label
    match: Match = Match()
    action: RuleAction
    percent: Percent = 100.0
    variant: Label = CANARY
    control: ControlArm = ControlArm.DEFAULT
    effect: Effect = Effect()

    @property
    def basis_points(self) -> int:
        """The percentage in hundredths, 0 … 10000."""
        return round(self.percent * 100)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.action is RuleAction.DENY:
            for name in ("percent", "variant", "control", "effect"):
                if name in self.model_fields_set:
                    raise PydanticCustomError("deny", "a deny rule has none", {"at": f".{name}"})
        if self.variant in RESERVED_VARIANTS:
            raise PydanticCustomError(
                "variant",
                "the name is reserved",
                {"at": ".variant", "limit": f"none of {', '.join(RESERVED_VARIANTS)}"},
            )
        return self


class Kill(StrictModel):
    """Off at once, whatever rules and requests say."""

    all: bool = False
    models: Names | None = None
    tenants: Names | None = None
    draft_versions: Names | None = None


class DefaultSettings(StrictModel):
    """For requests that no rule decides; a request may choose otherwise."""

    enabled: bool = True
    drafter: AnyDrafter = Drafter.AUTO
    max_draft_tokens: DraftTokens = 5


class PolicyDocument(StrictModel):
    """One version of the operator's policy. Rules are tried in order, but any deny that matches wins."""

    schema_name: Annotated[Literal["paceline.policy/v1"], Field(alias="schema")]
    salt: Name = "v1"
    targeting_key: TargetingKey = TargetingKey.USER
    kill: Kill = Kill()
    rules: Annotated[tuple[Rule, ...], Field(max_length=MAX_RULES)] = ()
    default: DefaultSettings = DefaultSettings()

    @model_validator(mode="after")
    def _ids_are_unique(self) -> Self:
        seen: set[str] = set()
        for index, rule in enumerate(self.rules):
            if rule.id in seen:
                raise PydanticCustomError("duplicate", "another rule has this id", {"at": f".rules[{index}].id"})
            seen.add(rule.id)
        return self

    def canonical_json(self) -> str:
        """The same text for documents that mean the same: sorted keys, no spaces, defaults left out."""
        values = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    def digest(self) -> str:
        """sha256 of the canonical JSON in UTF-8, in hex."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()


def parse_document(source: str | Mapping[str, object]) -> PolicyDocument:
    """A document from YAML or JSON text, or from plain values. Raises DocumentError with every flaw."""
    return parse(PolicyDocument, source)
