"""What Serve's deployments, its application and its gRPC services are called. Needs no Ray."""

from __future__ import annotations

from typing import Final

APPLICATION: Final = "paceline"
ROUTER: Final = "router"
CONTROL: Final = "control"
BUILDER: Final = "deployments.app:build_from_config"
GRPC_SERVICER_FUNCTIONS: Final = (
    "protos.paceline.v1.inference_pb2_grpc.add_InferenceServiceServicer_to_server",
    "protos.paceline.v1.control_pb2_grpc.add_ControlServiceServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
)


def target_deployment(model: str) -> str:
    """The deployment of a model's target pool."""
    return f"target-{model}"


def draft_deployment(model: str) -> str:
    """The deployment of a model's draft pool."""
    return f"draft-{model}"
