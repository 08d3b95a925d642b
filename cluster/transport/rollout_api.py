"""Rollouts in the admin API over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from cluster.control.rollout import RolloutCommand
from cluster.control.rollout_entry import RolloutView
from cluster.transport.admin_fields import AdminBody, Page, Text
from cluster.transport.control_backend import ControlBackend


class StartBody(AdminBody):
    """A rollout to begin."""

    text: Annotated[Text, Field(description="YAML or JSON")]
    author: Text
    reason: Text = ""


class CommandBody(AdminBody):
    """Who does something to a rollout by hand, and why."""

    author: Text
    reason: Text = ""


def rollout_routes(authorised: Any) -> APIRouter:
    """`authorised` depends on the admin token, and gives the ControlBackend."""
    routes = APIRouter()

    @routes.post("/rollouts")
    async def start_rollout(body: StartBody, control: ControlBackend = authorised) -> RolloutView:
        """Begin a rollout. 400 lists every flaw; 409 while another rollout of its rule is not finished."""
        return await control.rollouts.start(body.text, body.author, body.reason)

    @routes.get("/rollouts")
    async def list_rollouts(limit: Page = 20, control: ControlBackend = authorised) -> list[RolloutView]:
        """Those started last, newest first."""
        return list(await control.rollouts.list(limit))

    @routes.get("/rollouts/{rollout_id}")
    async def get_rollout(rollout_id: str, control: ControlBackend = authorised) -> RolloutView:
        """One rollout: where it is, why, and what was measured."""
        return await control.rollouts.get(rollout_id)

    @routes.post("/rollouts/{rollout_id}/{command}")
    async def control_rollout(
        rollout_id: str, command: RolloutCommand, body: CommandBody, control: ControlBackend = authorised
    ) -> RolloutView:
        """Pause, resume, promote or abort it by hand. 409 if its phase does not allow that."""
        return await control.rollouts.command(rollout_id, command, body.author, body.reason)

    return routes
