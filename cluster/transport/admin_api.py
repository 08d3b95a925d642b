"""The admin API over HTTP: documents, their history, and who runs which version; openapi.json describes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field

from cluster.control.report import Report
from cluster.control.report_query import parse_query
from cluster.control.store import MAX_PAGE, AuditEntry, Change, Kind, Restore, Snapshot, VersionInfo
from cluster.control.switch import SpeculationSwitch
from cluster.messages.answer import ErrorKind, RequestError
from cluster.transport.admin_token import AUTHORIZATION, AdminToken
from cluster.transport.control_backend import ControlBackend, ControlStatus
from cluster.transport.openai_errors import error_response, on_request_error
from cluster.transport.rollout_api import rollout_routes

PREFIX = "/admin/v1"

_BEARER = HTTPBearer(auto_error=False, description="The admin token")


class DocumentAnswer(BaseModel):
    """A document as of one version."""

    info: VersionInfo
    text: str


class ApplyBody(BaseModel):
    """A document to put in force."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[str, Field(description="YAML or JSON")]
    author: str
    reason: str = ""
    expected_version: Annotated[
        int | None, Field(ge=0, description="The version it was made from (0: there is none); absent: whatever stands")
    ] = None


class RollBackBody(BaseModel):
    """A version to bring back."""

    model_config = ConfigDict(extra="forbid")

    version: Annotated[int, Field(ge=1)]
    author: str
    reason: str = ""


class SwitchBody(BaseModel):
    """Speculation on or off for those that all of the given names hold for; none given: for everyone."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool
    model: str | None = None
    tenant: str | None = None
    draft_version: str | None = None
    percent: Annotated[
        float | None, Field(ge=0, le=100, description="With enabled: on for this share of them, off for the rest")
    ] = None
    author: str
    reason: str = ""

    def switch(self) -> SpeculationSwitch:
        return SpeculationSwitch(self.enabled, self.model, self.tenant, self.draft_version, self.percent)


def create_admin_app(backend: Callable[[], ControlBackend], token: AdminToken) -> FastAPI:
    """The application, to be mounted at PREFIX. `backend` is called for each request, and may raise RequestError."""

    def authorised(
        request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]
    ) -> ControlBackend:
        token.check(request.headers.get(AUTHORIZATION))
        return backend()

    app = FastAPI(title="Paceline administration", version="1", docs_url=None, redoc_url=None)
    app.include_router(rollout_routes(Depends(authorised)))  # first: /{kind} would take their paths
    app.include_router(_routes(Depends(authorised)))
    app.add_exception_handler(RequestError, on_request_error)
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
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
        before: Annotated[int | None, Query(ge=1)] = None,
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
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
        before: Annotated[int | None, Query(ge=1)] = None,
        control: ControlBackend = authorised,
    ) -> list[VersionInfo]:
        """Newest first, with author, time, reason and difference."""
        return list(await control.history(kind, limit, before))

    @routes.get("/{kind}/versions/{version}")
    async def get_version(kind: Kind, version: int, control: ControlBackend = authorised) -> DocumentAnswer:
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
    field = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
    return error_response(RequestError(ErrorKind.INVALID, f"{field}: {first['msg']}", field))
