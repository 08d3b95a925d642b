"""What Serve's deployments, its application and its gRPC services are called. Needs no Ray."""

from __future__ import annotations

from typing import Final

APPLICATION: Final = "paceline"
ROUTER: Final = "router"
CONTROL: Final = "control"
BUILDER: Final = "deployments.app:build_from_config"
AUTOSCALING_POLICY: Final = "deployments.autoscaling:pool_replicas"
GRPC_SERVICER_FUNCTIONS: Final = (
    "protos.paceline.v1.inference_pb2_grpc.add_InferenceServiceServicer_to_server",
    "protos.paceline.v1.control_pb2_grpc.add_ControlServiceServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
)

# Ray puts its workers last (15): whatever runs on a client's or on Ray's own behalf would interrupt a model's kernels,
# all of whose threads then wait for one (an eighth of the time per token where everything shares two cores).
NICENESS_VARIABLE: Final = "RAY_worker_niceness"
NICENESS: Final = "0"

_DRAFT: Final = "draft-"


def target_deployment(model: str) -> str:
    """The deployment of a model's target pool."""
    return f"target-{model}"


def draft_deployment(model: str) -> str:
    """The deployment of a model's draft pool."""
    return f"{_DRAFT}{model}"


def model_of_draft(deployment: str) -> str | None:
    """The model whose draft pool this deployment is; None: it is none."""
    return deployment.removeprefix(_DRAFT) if deployment.startswith(_DRAFT) else None
