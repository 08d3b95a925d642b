"""One file describes the whole system. Frozen, unknown keys rejected, loaded once, never mutated."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path, PurePath
from typing import Annotated, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from cluster.frozen_model import Frozen
from cluster.kubernetes_config import KubernetesConfig
from cluster.messages.request import Drafter
from cluster.messages.request import DraftLengthMode as DraftLengthMode  # re-exported: values of a field below
from cluster.messages.request import HoldMode as HoldMode


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the field and the limit."""


# Names and values that both Ray and Kubernetes take.
LabelName = Annotated[str, Field(pattern=r"^([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")]
LabelValue = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")]
LabelSelector = Annotated[dict[LabelName, LabelValue], Field(description="labels that a replica's Ray node must have")]


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class DType(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Quantization(StrEnum):
    """How matrices of weights are stored, if not in the pool's dtype."""

    NONE = "none"
    INT8 = "int8"


class AutoscalingConfig(Frozen):
    """Between how many replicas a pool has, on a cluster that has room for them."""

    min_replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    max_replicas: Annotated[int, Field(ge=1, le=1024)]
    upscale_delay_s: Annotated[float, Field(ge=0)] = 30.0
    downscale_delay_s: Annotated[float, Field(ge=0)] = 600.0

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}")
        return self


class PoolConfig(Frozen):
    """One pool of replicas of one model."""

    path: str = Field(description="a known model name, a directory in transformers' format, a .gguf file, or a hub id")
    version: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        default=None, description="what policies call this model's version; None: the last part of the path"
    )
    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    autoscaling: AutoscalingConfig | None = Field(default=None, description="on Kubernetes goes before replicas")
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    dtype: DType = DType.BFLOAT16
    quantization: Quantization = Quantization.NONE
    max_model_len: Annotated[int, Field(ge=16)] = 8192
    block_size: Annotated[int, Field(ge=1, le=256)] | None = Field(
        default=None, description="None: 16, or on CUDA what its attention kernel reads"
    )
    kv_memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.3
    kv_blocks: Annotated[int, Field(ge=1)] | None = Field(default=None, description="overrides kv_memory_fraction")
    prefix_cache: bool = True
    cuda_graphs: bool = True
    batch_invariant: bool = False
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 64
    max_num_batched_tokens: Annotated[int, Field(ge=16)] = 512
    max_queued: Annotated[int, Field(ge=0)] = 1024
    num_threads: Annotated[int, Field(ge=1)] | None = Field(default=None, description="None: all cores of the machine")
    num_cpus: Annotated[float, Field(ge=0)] = 0.5
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    label_selector: LabelSelector | None = None

    @property
    def version_name(self) -> str:
        """The version, or what stands for it."""
        return self.version or PurePath(self.path).name or self.path

    @model_validator(mode="after")
    def _ranks_have_resources(self) -> Self:
        if self.tensor_parallel > 1 and not (self.num_cpus or self.num_gpus):
            raise ValueError("tensor_parallel above 1 needs num_cpus or num_gpus above 0, to be placed")
        return self


class ModelConfig(Frozen):
    """A served model: its target pool and, optionally, the draft pool that guesses for it."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    target: PoolConfig
    draft: PoolConfig | None = None


class SpeculationConfig(Frozen):
    """Defaults; a request may override them, policy may forbid them."""

    enabled: bool = True
    max_draft_tokens: Annotated[int, Field(ge=1, le=32)] = 5
    drafter: Drafter = Drafter.AUTO
    acceptance: Annotated[str, Field(pattern="^equal$")] = "equal"
    draft_length: DraftLengthMode = DraftLengthMode.ADAPTIVE
    hold: HoldMode = HoldMode.BREAK_EVEN
    max_hold_ms: Annotated[float, Field(gt=0, le=10_000)] = 50.0
    ngram_min_match: Annotated[int, Field(ge=1, le=16)] = 2
    ngram_max_match: Annotated[int, Field(ge=1, le=32)] = 5


class RouterConfig(Frozen):
    replicas: Annotated[int, Field(ge=1)] = 1
    host: str = "127.0.0.1"
    http_port: Annotated[int, Field(ge=0, le=65535)] = 8000
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = 9000
    max_queued_per_tenant: Annotated[int, Field(ge=1)] = 256
    max_tenants: Annotated[int, Field(ge=1)] = 10_000
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    require_keys: bool = Field(default=False, description="refuse requests without an API key, though none is known")
    num_cpus: Annotated[float, Field(ge=0)] = 0.2
    label_selector: LabelSelector | None = None


class ControlConfig(Frozen):
    """The control service: one replica that keeps policies, API keys and rollouts."""

    store: Annotated[str, Field(pattern=r"^(sqlite:///|rediss?://|unix://).", max_length=1024)] = (
        "sqlite:///~/.local/state/paceline/control.db"
    )
    num_cpus: Annotated[float, Field(ge=0)] = 0.1
    label_selector: LabelSelector | None = None


class ClusterConfig(Frozen):
    """The whole system."""

    models: Annotated[tuple[ModelConfig, ...], Field(min_length=1)]
    speculation: SpeculationConfig = SpeculationConfig()
    router: RouterConfig = RouterConfig()
    control: ControlConfig = ControlConfig()
    device: Device = Device.AUTO
    kubernetes: KubernetesConfig | None = None

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [model.name for model in self.models]
        if len(set(names)) != len(names):
            raise ValueError(f"models: names must be unique, got {names}")
        return self


DEMO_CONFIG = ClusterConfig(
    models=(
        ModelConfig(
            name="smollm2-135m",
            target=PoolConfig(path="smollm2-135m", kv_memory_fraction=0.1),
            draft=PoolConfig(path="smollm2-135m-draft", kv_memory_fraction=0.02),
        ),
    )
)


def load_config(path: Path | None) -> ClusterConfig:
    """Read a YAML file; None gives the demo. Raises ConfigError naming every bad field."""
    if path is None:
        return DEMO_CONFIG
    try:
        return ClusterConfig.model_validate(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    except ValidationError as error:
        found = [(".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")) for e in error.errors()]
        lines = [f"{field or 'config'}: {message}" for field, message in found]
        raise ConfigError(f"{path}: " + "; ".join(lines)) from error
