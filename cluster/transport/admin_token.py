"""Who may administer: whoever has the admin token."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Final

from cluster.messages.answer import ErrorKind, RequestError

ADMIN_TOKEN_VARIABLE: Final = "PACELINE_ADMIN_TOKEN"
AUTHORIZATION: Final = "authorization"
_SCHEME = "bearer "


def bearer(authorization: str | None) -> str | None:
    """The token of an Authorization header's value; None for anything else."""
    if authorization is None or not authorization.lower().startswith(_SCHEME):
        return None
    return authorization[len(_SCHEME) :].strip()


def configured_token(environment: Mapping[str, str]) -> str | None:
    """The admin token of an environment, without the line end that a secret from a file may have.

    Raises ValueError for one that no header can carry.
    """
    token = environment.get(ADMIN_TOKEN_VARIABLE, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise ValueError(f"{ADMIN_TOKEN_VARIABLE} should have printable ASCII characters only")
    return token or None


class AdminToken:
    """Owns the digest of the admin token; without one, nobody may administer."""

    def __init__(self, token: str | None) -> None:
        self._digest = hashlib.sha256(token.encode()).digest() if token else None

    @property
    def is_set(self) -> bool:
        return self._digest is not None

    def check(self, authorization: str | None) -> None:
        """Raises RequestError: FORBIDDEN without a configured token, UNAUTHENTICATED for a missing or wrong one."""
        if self._digest is None:
            message = f"administration is off: {ADMIN_TOKEN_VARIABLE} is not set where the cluster runs"
            raise RequestError(ErrorKind.FORBIDDEN, message)
        token = bearer(authorization)
        if token is None:
            message = "administration needs the header `Authorization: Bearer <admin token>`"
            raise RequestError(ErrorKind.UNAUTHENTICATED, message)
        if not hmac.compare_digest(hashlib.sha256(token.encode()).digest(), self._digest):
            raise RequestError(ErrorKind.UNAUTHENTICATED, "the admin token is wrong")

    def check_if_set(self, authorization: str | None) -> None:
        """For calls from inside the cluster, which are open while no token is configured."""
        if self.is_set:
            self.check(authorization)
