"""The admin API over HTTP: documents, their history, and who runs which version; openapi.json describes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, Field

from cluster.control.report import Report
from cluster.control.report_query import parse_query
from cluster.control.store import AuditEntry, Change, Kind, Restore, Snapshot, VersionInfo
from cluster.control.switch import SpeculationSwitch
from cluster.messages.answer import ErrorKind, RequestError
from cluster.transport.admin_door import AdminDoor
from cluster.transport.admin_fields import AdminBody, Before, Page, Text, Version
from cluster.transport.admin_token import AdminToken
from cluster.transport.control_backend import ControlBackend, ControlStatus
from cluster.transport.openai_errors import add_error_handlers, error_response
from cluster.transport.rollout_api import rollout_routes

PREFIX = "/admin/v1"
_DESCRIPTION = "/openapi.json"

_BEARER = HTTPBearer(auto_error=False, description="The admin token")


class DocumentAnswer(BaseModel):
    """A document as of one version."""

    info: VersionInfo
    text: str


class ApplyBody(AdminBody):
    """A document to put in force."""

    text: Annotated[Text, Field(description="YAML or JSON")]
    author: Text
    reason: Text = ""
    expected_version: Annotated[
        Version | None, Field(description="The version it was made from (0: there is none); absent: whatever stands")
    ] = None


class RollBackBody(AdminBody):
    """A version to bring back."""

    version: Version
    author: Text
    reason: Text = ""


class SwitchBody(AdminBody):
    """Speculation on or off for those that all of the given names hold for; none given: for everyone."""

    enabled: bool
    model: Text | None = None
    tenant: Text | None = None
    draft_version: Text | None = None
    percent: Annotated[
        float | None, Field(ge=0, le=100, description="With enabled: on for this share of them, off for the rest")
    ] = None
    author: Text
    reason: Text = ""

    def switch(self) -> SpeculationSwitch:
        return SpeculationSwitch(self.enabled, self.model, self.tenant, self.draft_version, self.percent)


def create_admin_app(backend: Callable[[], ControlBackend], token: AdminToken) -> FastAPI:
    """The application, to be mounted at PREFIX. `backend` is called for each request, and may raise RequestError."""

    def authorised(_: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]) -> ControlBackend:
        return backend()  # AdminDoor has checked the token

    app = FastAPI(title="Paceline administration", version="1", openapi_url=_DESCRIPTION, docs_url=None, redoc_url=None)
    app.include_router(rollout_routes(Depends(authorised)))  # first: /{kind} would take their paths
    app.include_router(_routes(Depends(authorised)))
    app.add_middleware(AdminDoor, token=token, open_path=_DESCRIPTION)
    add_error_handlers(app)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    return app


def _routes(authorised: Any) -> APIRouter:
    routes = APIRouter()

    @routes.get("/status")
    async def get_status(control: ControlBackend = authorised) -> ControlStatus:
        """The versions in force, the routers that run them, and whether the store answers."""
        return await control.status()

    @routes.post("/speculation")
    async def switch_speculation(body: SwitchBody, control: ControlBackend = authorised) -> DocumentAnswer:
        """Turn speculation on or off, for running streams too."""
        return _answer(await control.switch_speculation(body.switch(), body.author, body.reason))

    @routes.get("/report")
    async def get_report(
        window: Annotated[str, Query(description="1m, 10m, 1h")] = "10m",
        by: Annotated[str, Query(max_length=256, description="Dimensions, separated by commas")] = "model,variant",
        control: ControlBackend = authorised,
    ) -> Report:
        """What the finished requests of a window were like, and why speculation does not pay where it does not."""
        return await control.report(parse_query(window, by.split(",")))

    @routes.get("/audit")
    async def list_audit(
        limit: Page = 20,
        before: Before = None,
        control: ControlBackend = authorised,
    ) -> list[AuditEntry]:
        """Who changed what, when and why; newest first. `before` continues an earlier page."""
        return list(await control.audit(limit, before))

    @routes.get("/{kind}")
    async def get_document(kind: Kind, control: ControlBackend = authorised) -> DocumentAnswer:
        """The document in force; before the first one, what holds without it, as version 0."""
        return _answer(await control.get(kind))

    @routes.put("/{kind}")
    async def apply_document(kind: Kind, body: ApplyBody, control: ControlBackend = authorised) -> DocumentAnswer:
        """Put a document in force. 400 lists every flaw, 409 means that someone else was first."""
        change = Change(body.text, body.author, body.reason)
        return _answer(await control.apply(kind, change, body.expected_version))

    @routes.get("/{kind}/versions")
    async def list_versions(
        kind: Kind,
        limit: Page = 20,
        before: Before = None,
        control: ControlBackend = authorised,
    ) -> list[VersionInfo]:
        """Newest first, with author, time, reason and difference."""
        return list(await control.history(kind, limit, before))

    @routes.get("/{kind}/versions/{version}")
    async def get_version(kind: Kind, version: Version, control: ControlBackend = authorised) -> DocumentAnswer:
        """One version."""
        return _answer(await control.get(kind, version))

    @routes.post("/{kind}/rollback")
    async def roll_back(kind: Kind, body: RollBackBody, control: ControlBackend = authorised) -> DocumentAnswer:
        """Put an earlier version's text in force, as a new version."""
        return _answer(await control.roll_back(kind, Restore(body.version, body.author, body.reason)))

    return routes


def _answer(snapshot: Snapshot) -> DocumentAnswer:
    return DocumentAnswer.model_validate(asdict(snapshot))


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where, *path = first["loc"]
    field = str(where) if first["type"] == "json_invalid" else ".".join(map(str, path)) or str(where)
    return error_response(RequestError(ErrorKind.INVALID, f"{field}: {first['msg']}", field))
