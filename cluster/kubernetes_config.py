"""What only Kubernetes needs to know. `paceline serve` reads the same file and looks at nothing here."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cluster.frozen_model import Frozen

DnsLabel = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]*[a-z0-9])?$", max_length=63)]


class Toleration(Frozen):
    """A node taint that a pod may stand."""

    key: str
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = "NoSchedule"


class PodConfig(Frozen):
    """One pod of a worker group; it holds one replica, all of its ranks included."""

    cpus: Annotated[float, Field(gt=0)]
    memory_gib: Annotated[float, Field(gt=0)] = Field(description="request and limit")
    shm_gib: Annotated[float, Field(gt=0)] = Field(default=1.0, description="/dev/shm, a part of memory_gib")
    node_selector: dict[str, str] | None = None
    tolerations: tuple[Toleration, ...] = ()


class RedisConfig(Frozen):
    """Where Ray keeps the state of its head, and Paceline its policies: one that is there, or one to deploy."""

    address: Annotated[str, Field(pattern=r"^[^\s:/]+:\d+$")] | None = None
    image: str | None = None

    @model_validator(mode="after")
    def _is_there_or_deployed(self) -> Self:
        if (self.address is None) == (self.image is None):
            raise ValueError("redis needs either address (one that is there) or image (one to deploy)")
        return self


class KubernetesConfig(Frozen):
    """How the system lies in a Kubernetes cluster."""

    image: Annotated[str, Field(min_length=1)]
    namespace: DnsLabel = "paceline"
    secret: DnsLabel = "paceline"
    monitoring_namespace: DnsLabel | None = Field(default=None, description="where a Prometheus operator runs")
    model_claim: DnsLabel | None = Field(default=None, description="a volume with models, mounted at /models")
    redis: RedisConfig
    pods: dict[str, PodConfig] = Field(description="by worker group, or by pool for all groups of it")
