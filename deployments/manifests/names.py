"""Names, ports and labels that several manifests agree on."""

from __future__ import annotations

from typing import Any, Final

Json = dict[str, Any]

NAME: Final = "paceline"
APP_LABELS: Final = {"app.kubernetes.io/part-of": NAME}  # KubeRay's own services select by app.kubernetes.io/name
HEAD: Final = "head"  # values of the label `pool` beside those of worker groups
REDIS: Final = "redis"
RAY_VERSION: Final = "2.60.0"

HTTP_PORT_NAME: Final = "serve"  # KubeRay looks for it by this name
GRPC_PORT_NAME: Final = "serve-grpc"
HTTP_PORT: Final = 8000  # of our Services; containers listen where the configuration says
GRPC_PORT: Final = 9000
RAY_METRICS_PORT_NAME: Final = "metrics"
RAY_METRICS_PORT: Final = 8080
APP_METRICS_PORT_NAME: Final = "app-metrics"
APP_METRICS_PORT: Final = 9400
DASHBOARD_PORT_NAME: Final = "dashboard"
HEAD_PORTS: Final = {
    "gcs-server": 6379,
    DASHBOARD_PORT_NAME: 8265,
    "client": 10001,
    "as-metrics": 44217,
    "dash-metrics": 44227,
}
METRICS_PORT_NAMES: Final = (RAY_METRICS_PORT_NAME, APP_METRICS_PORT_NAME, "as-metrics", "dash-metrics")
REDIS_PORT: Final = 6379

# Keys of the one secret.
REDIS_PASSWORD_KEY: Final = "redis-password"
STORE_URL_KEY: Final = "store-url"
ADMIN_TOKEN_KEY: Final = "admin-token"


def pods_of(*pools: str) -> Json:
    """A label selector of the pods of these pools."""
    if len(pools) == 1:
        return {"matchLabels": APP_LABELS | {"pool": pools[0]}}
    return {"matchLabels": APP_LABELS, "matchExpressions": [{"key": "pool", "operator": "In", "values": list(pools)}]}


def manifest(api_version: str, kind: str, name: str, spec: Json, labels: Json | None = None) -> Json:
    """A Kubernetes object."""
    metadata = {"name": name, "labels": APP_LABELS | (labels or {})}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}


def from_secret(variable: str, secret: str, key: str) -> Json:
    """An environment variable whose value is in a secret."""
    return {"name": variable, "valueFrom": secret_ref(secret, key)}


def secret_ref(secret: str, key: str) -> Json:
    """A value that is in a secret."""
    return {"secretKeyRef": {"name": secret, "key": key}}
