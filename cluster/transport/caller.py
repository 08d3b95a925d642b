"""Who asks: what a request's headers, its key and its body say about that."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from cluster.control.access import ApiKey
from cluster.messages.answer import ErrorKind, RequestError
from cluster.transport.admin_token import AUTHORIZATION, bearer
from cluster.transport.validation import InvalidRequest

TENANT_HEADER = "X-Paceline-Tenant"
WORKLOAD_HEADER = "X-Paceline-Workload"
USER_HEADER = "X-Paceline-User"
SESSION_HEADER = "X-Paceline-Session"
MAX_KEY_CHARS = 256  # of a user or a session

_LABEL = re.compile(r"[A-Za-z0-9._-]{1,64}")

KeyHolder = Callable[[str | None], ApiKey | None]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and for what kind of work. user and session keep the requests of one together in a gray release."""

    tenant: str = "default"
    workload: str = "default"
    user: str | None = None
    session: str | None = None
    key_label: str | None = None

    @classmethod
    def from_headers(cls, headers: Mapping[str, str], key_holder: KeyHolder) -> Self:
        """From lower-case header or metadata names. Raises InvalidRequest naming the header.

        Where requests need a key, the tenant is the key's. Raises RequestError: UNAUTHENTICATED for no key or a wrong
        one, FORBIDDEN for a header that names another tenant.
        """
        holder = key_holder(bearer(headers.get(AUTHORIZATION)))
        caller = cls(
            "default" if holder is None else holder.tenant,
            _label(headers, WORKLOAD_HEADER) or "default",
            _header_key(headers, USER_HEADER),
            _header_key(headers, SESSION_HEADER),
            None if holder is None else holder.label,
        )
        return caller.of_tenant(_label(headers, TENANT_HEADER))

    def of_tenant(self, tenant: str | None) -> Self:
        """The same caller for a tenant that the request names, if it does."""
        if tenant is None or tenant == self.tenant:
            return self
        if self.key_label is not None:
            raise RequestError(ErrorKind.FORBIDDEN, f"the API key is not one of tenant {tenant!r}", "tenant")
        return replace(self, tenant=tenant)

    def with_keys(self, user: str | None = None, session: str | None = None) -> Self:
        """What the body says goes before the headers. Raises InvalidRequest naming the field."""
        return replace(
            self,
            user=check_key(user, "user") or self.user,
            session=check_key(session, "session") or self.session,
        )


def _label(headers: Mapping[str, str], name: str) -> str | None:
    value = headers.get(name.lower())
    return None if value is None else check_label(value, name)


def check_label(value: str, param: str) -> str:
    """A tenant or workload name. Raises InvalidRequest."""
    if _LABEL.fullmatch(value) is None:
        raise InvalidRequest(f"{param}: should be 1 to 64 letters, digits, dots, dashes or underscores", param)
    return value


def _header_key(headers: Mapping[str, str], name: str) -> str | None:
    """Headers have no encoding that everybody agrees on, and a key must be the same everywhere: ASCII it is."""
    value = headers.get(name.lower())
    if value is not None and not (value.isascii() and value.isprintable()):
        raise InvalidRequest(f"{name}: should have printable ASCII characters only", name)
    return check_key(value, name)


def check_key(value: str | None, param: str) -> str | None:
    """A user's or session's name; an empty one is none. Raises InvalidRequest."""
    if value is not None and len(value) > MAX_KEY_CHARS:
        raise InvalidRequest(f"{param}: should have at most {MAX_KEY_CHARS} characters", param)
    return value or None
