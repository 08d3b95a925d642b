"""The control protocol's messages ↔ the values that services use."""

from __future__ import annotations

from cluster.control.store import AuditEntry, Kind, Snapshot, VersionInfo
from cluster.control.switch import SpeculationSwitch
from cluster.messages.answer import ErrorKind, RequestError
from cluster.transport.control_backend import Acknowledgement, ControlStatus, RouterState
from protos.paceline.v1 import control_pb2 as pb

_TO_WIRE = {Kind.POLICY: pb.DOCUMENT_KIND_POLICY, Kind.ACCESS: pb.DOCUMENT_KIND_ACCESS}
_FROM_WIRE: dict[int, Kind] = {wire: kind for kind, wire in _TO_WIRE.items()}


def kind_to_wire(kind: Kind) -> pb.DocumentKind:
    return _TO_WIRE[kind]


def kind_from_wire(kind: int) -> Kind:
    """Raises RequestError(INVALID) for a kind that is not given, or unknown."""
    known = _FROM_WIRE.get(kind)
    if known is None:
        raise RequestError(ErrorKind.INVALID, "kind: must be DOCUMENT_KIND_POLICY or DOCUMENT_KIND_ACCESS", "kind")
    return known


def snapshot_to_wire(snapshot: Snapshot) -> pb.Document:
    return pb.Document(info=version_to_wire(snapshot.info), text=snapshot.text)


def snapshot_from_wire(document: pb.Document) -> Snapshot:
    return Snapshot(version_from_wire(document.info), document.text)


def version_to_wire(info: VersionInfo) -> pb.VersionInfo:
    return pb.VersionInfo(
        kind=kind_to_wire(info.kind),
        version=info.version,
        digest=info.digest,
        author=info.author,
        reason=info.reason,
        written_at=info.written_at,
        diff=info.diff,
        restores=info.restores,
    )


def version_from_wire(info: pb.VersionInfo) -> VersionInfo:
    return VersionInfo(
        kind_from_wire(info.kind),
        info.version,
        info.digest,
        info.author,
        info.reason,
        info.written_at,
        info.diff,
        info.restores if info.HasField("restores") else None,
    )


def audit_to_wire(entry: AuditEntry) -> pb.AuditEntry:
    return pb.AuditEntry(
        sequence=entry.sequence,
        at=entry.at,
        actor=entry.actor,
        action=entry.action,
        target=entry.target,
        outcome=entry.outcome,
        detail=entry.detail,
    )


def audit_from_wire(entry: pb.AuditEntry) -> AuditEntry:
    return AuditEntry(entry.actor, entry.action, entry.target, entry.outcome, entry.at, entry.detail, entry.sequence)


def switch_to_wire(switch: SpeculationSwitch, author: str, reason: str) -> pb.SwitchSpeculationRequest:
    return pb.SwitchSpeculationRequest(
        enabled=switch.enabled,
        model=switch.model,
        tenant=switch.tenant,
        draft_version=switch.draft_version,
        percent=switch.percent,
        author=author,
        reason=reason,
    )


def switch_from_wire(request: pb.SwitchSpeculationRequest) -> SpeculationSwitch:
    return SpeculationSwitch(
        request.enabled,
        request.model if request.HasField("model") else None,
        request.tenant if request.HasField("tenant") else None,
        request.draft_version if request.HasField("draft_version") else None,
        request.percent if request.HasField("percent") else None,
    )


def status_to_wire(status: ControlStatus) -> pb.GetStatusResponse:
    routers = [
        pb.RouterState(
            router_id=router.router_id,
            policy_version=router.policy_version,
            access_version=router.access_version,
            error=router.error,
        )
        for router in status.routers
    ]
    return pb.GetStatusResponse(
        policy_version=status.policy_version,
        access_version=status.access_version,
        routers=routers,
        store_error=status.store_error,
    )


def status_from_wire(status: pb.GetStatusResponse) -> ControlStatus:
    routers = tuple(
        RouterState(router.router_id, router.policy_version, router.access_version, router.error)
        for router in status.routers
    )
    return ControlStatus(status.policy_version, status.access_version, routers, status.store_error)


def acknowledgement_to_wire(item: Acknowledgement) -> pb.Acknowledgement:
    return pb.Acknowledgement(kind=kind_to_wire(item.kind), version=item.version, error=item.error)


def acknowledgement_from_wire(item: pb.Acknowledgement) -> Acknowledgement:
    return Acknowledgement(kind_from_wire(item.kind), item.version, item.error)
