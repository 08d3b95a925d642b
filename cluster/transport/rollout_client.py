"""A client of the control service's rollouts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from cluster.control.rollout import RolloutCommand
from cluster.control.rollout_entry import RolloutView
from cluster.transport.rollout_codec import view_from_wire
from protos.paceline.v1 import control_pb2 as pb
from protos.paceline.v1 import control_pb2_grpc


class RolloutClient:
    """A RolloutBackend over somebody else's channel; every failed call raises RequestError."""

    def __init__(
        self, stub: control_pb2_grpc.ControlServiceStub, call: Callable[[Callable[..., Any], Any], Awaitable[Any]]
    ) -> None:
        self._stub = stub
        self._call = call

    async def start(self, text: str, author: str, reason: str) -> RolloutView:
        request = pb.StartRolloutRequest(text=text, author=author, reason=reason)
        return view_from_wire(await self._call(self._stub.StartRollout, request))

    async def get(self, rollout_id: str) -> RolloutView:
        return view_from_wire(await self._call(self._stub.GetRollout, pb.GetRolloutRequest(rollout_id=rollout_id)))

    async def list(self, limit: int) -> tuple[RolloutView, ...]:
        answer = await self._call(self._stub.ListRollouts, pb.ListRolloutsRequest(limit=limit))
        return tuple(map(view_from_wire, answer.rollouts))

    async def command(self, rollout_id: str, command: RolloutCommand, author: str, reason: str) -> RolloutView:
        request = pb.ControlRolloutRequest(rollout_id=rollout_id, command=command.value, author=author, reason=reason)
        return view_from_wire(await self._call(self._stub.ControlRollout, request))
