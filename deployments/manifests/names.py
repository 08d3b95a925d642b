"""Names, ports and labels that several manifests agree on."""

from __future__ import annotations

from typing import Any, Final

Json = dict[str, Any]

NAME: Final = "paceline"
APP_LABELS: Final = {"app.kubernetes.io/name": NAME}
REDIS_LABELS: Final = {"app.kubernetes.io/name": f"{NAME}-redis"}
RAY_VERSION: Final = "2.60.0"

HTTP_PORT_NAME: Final = "serve"  # KubeRay looks for it by this name
GRPC_PORT_NAME: Final = "serve-grpc"
REDIS_PORT: Final = 6379

# Keys of the one secret.
REDIS_PASSWORD_KEY: Final = "redis-password"
STORE_URL_KEY: Final = "store-url"
ADMIN_TOKEN_KEY: Final = "admin-token"


def from_secret(variable: str, secret: str, key: str) -> Json:
    """An environment variable whose value is in a secret."""
    return {"name": variable, "valueFrom": secret_ref(secret, key)}


def secret_ref(secret: str, key: str) -> Json:
    """A value that is in a secret."""
    return {"secretKeyRef": {"name": secret, "key": key}}
