"""A small Redis that keeps what it is told on a volume: for the state of Ray's head, and for policies."""

from __future__ import annotations

from typing import Any

from deployments.manifests.names import (
    APP_LABELS,
    NAME,
    REDIS,
    REDIS_PASSWORD_KEY,
    REDIS_PORT,
    from_secret,
    manifest,
)
from deployments.manifests.pods import CONTAINER_SECURITY

Json = dict[str, Any]

REDIS_NAME = f"{NAME}-redis"
_LABELS = {"pool": REDIS}
_USER_ID = 999  # `redis` in Redis' images


def redis(image: str, secret: str) -> list[Json]:
    """One replica with an append-only file. For more, use a Redis of your own."""
    ports = [{"name": "redis", "port": REDIS_PORT, "targetPort": "redis"}]
    service = {"selector": APP_LABELS | _LABELS, "ports": ports}
    return [
        manifest("v1", "Service", REDIS_NAME, service, _LABELS),
        manifest("apps/v1", "StatefulSet", REDIS_NAME, _stateful_set(image, secret), _LABELS),
    ]


def _stateful_set(image: str, secret: str) -> Json:
    claim = {
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    return {
        "serviceName": REDIS_NAME,
        "replicas": 1,
        "selector": {"matchLabels": APP_LABELS | _LABELS},
        "template": {"metadata": {"labels": APP_LABELS | _LABELS}, "spec": _pod(image, secret)},
        "volumeClaimTemplates": [claim],
    }


def _pod(image: str, secret: str) -> Json:
    return {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER_ID,
            "fsGroup": _USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(image, secret)],
    }


def _container(image: str, secret: str) -> Json:
    ping = {"exec": {"command": ["sh", "-c", 'REDISCLI_AUTH="$REDIS_PASSWORD" redis-cli ping | grep -q PONG']}}
    arguments = ["--dir", "/data", "--appendonly", "yes", "--requirepass", "$(REDIS_PASSWORD)"]
    return {
        "name": "redis",
        "image": image,
        "command": ["redis-server", *arguments],
        "env": [from_secret("REDIS_PASSWORD", secret, REDIS_PASSWORD_KEY)],
        "ports": [{"name": "redis", "containerPort": REDIS_PORT}],
        "readinessProbe": ping,
        "livenessProbe": ping | {"initialDelaySeconds": 30, "failureThreshold": 5},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": CONTAINER_SECURITY | {"readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
