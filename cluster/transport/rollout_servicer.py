"""The control service's calls about rollouts: protobuf to a RolloutBackend and back. Errors are RequestErrors."""

from __future__ import annotations

from cluster.control.rollout import RolloutCommand
from cluster.messages.answer import ErrorKind, RequestError
from cluster.transport.control_backend import RolloutBackend
from cluster.transport.rollout_codec import view_to_wire
from protos.paceline.v1 import control_pb2 as pb

DEFAULT_PAGE = 20


async def start(rollouts: RolloutBackend, request: pb.StartRolloutRequest) -> pb.Rollout:
    return view_to_wire(await rollouts.start(request.text, request.author, request.reason))


async def get(rollouts: RolloutBackend, request: pb.GetRolloutRequest) -> pb.Rollout:
    return view_to_wire(await rollouts.get(request.rollout_id))


async def list_all(rollouts: RolloutBackend, request: pb.ListRolloutsRequest) -> pb.ListRolloutsResponse:
    views = await rollouts.list(request.limit or DEFAULT_PAGE)
    return pb.ListRolloutsResponse(rollouts=map(view_to_wire, views))


async def control(rollouts: RolloutBackend, request: pb.ControlRolloutRequest) -> pb.Rollout:
    command = _command(request.command)
    return view_to_wire(await rollouts.command(request.rollout_id, command, request.author, request.reason))


def _command(value: str) -> RolloutCommand:
    try:
        return RolloutCommand(value)
    except ValueError as error:
        message = f"command: must be one of {', '.join(RolloutCommand)}"
        raise RequestError(ErrorKind.INVALID, message, "command") from error
