"""The access document: which API keys there are, whose they are, and how much each tenant may ask for.

A key is a random secret of at least 128 bits, so its plain SHA-256 is safe to keep: there is nothing to guess from. The
key itself is shown once, when it is made, and is kept nowhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from cluster.control.quota import Quota
from cluster.control.strict_document import StrictModel, parse

SCHEMA: Final = "paceline.access/v1"
MAX_KEYS: Final = 2000
MAX_TENANTS: Final = 2000
KEY_PREFIX: Final = "pl-"

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
PerMinute = Annotated[float, Field(ge=0.001, le=1e12)]


class ApiKey(StrictModel):
    """One key; policies can match its label."""

    label: Name
    tenant: Name
    sha256: Digest


class Limits(StrictModel):
    """A tenant's quota; what is left out is not limited."""

    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    max_concurrent: Annotated[int, Field(ge=1, le=1_000_000)] | None = None

    def quota(self) -> Quota:
        return Quota(self.requests_per_minute, self.tokens_per_minute, self.max_concurrent)


class QuotaSettings(StrictModel):
    """Quotas by tenant; a tenant that is not named has the default's."""

    default: Limits = Limits()
    tenants: Annotated[dict[Name, Limits], Field(max_length=MAX_TENANTS)] = Field(default_factory=dict)


class AccessDocument(StrictModel):
    """One version. As long as it has no key, tenants are what a request's header says."""

    schema_name: Annotated[Literal["paceline.access/v1"], Field(alias="schema")]
    keys: Annotated[tuple[ApiKey, ...], Field(max_length=MAX_KEYS)] = ()
    quotas: QuotaSettings = QuotaSettings()

    @model_validator(mode="after")
    def _keys_are_distinct(self) -> Self:
        labels: set[str] = set()
        digests: set[str] = set()
        for index, key in enumerate(self.keys):
            if key.label in labels:
                raise PydanticCustomError("duplicate", "another key has this label", {"at": f".keys[{index}].label"})
            if key.sha256 in digests:
                raise PydanticCustomError("duplicate", "the key is there twice", {"at": f".keys[{index}].sha256"})
            labels.add(key.label)
            digests.add(key.sha256)
        return self


def parse_access(source: str | Mapping[str, object]) -> AccessDocument:
    """A document from YAML or JSON text, or from plain values. Raises DocumentError with every flaw."""
    return parse(AccessDocument, source)


def key_digest(api_key: str) -> str:
    """What is kept of a key: its SHA-256, in hex."""
    return hashlib.sha256(api_key.encode(errors="replace")).hexdigest()


class AccessTable:
    """A document, ready to look up keys and quotas in."""

    def __init__(self, document: AccessDocument) -> None:
        self._keys = {key.sha256: key for key in document.keys}
        self._quotas = {tenant: limits.quota() for tenant, limits in document.quotas.tenants.items()}
        self._default = document.quotas.default.quota()

    @property
    def needs_key(self) -> bool:
        """Whether requests without a known key are refused."""
        return bool(self._keys)

    def key(self, api_key: str) -> ApiKey | None:
        """The entry of a key; None: unknown. Looking up a digest tells a guesser nothing about the key by its time."""
        return self._keys.get(key_digest(api_key))

    def quota(self, tenant: str) -> Quota:
        return self._quotas.get(tenant, self._default)


OPEN: Final = AccessTable(parse_access({"schema": SCHEMA}))
