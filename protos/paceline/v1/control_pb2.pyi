from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DocumentKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DOCUMENT_KIND_UNSPECIFIED: _ClassVar[DocumentKind]
    DOCUMENT_KIND_POLICY: _ClassVar[DocumentKind]
    DOCUMENT_KIND_ACCESS: _ClassVar[DocumentKind]
DOCUMENT_KIND_UNSPECIFIED: DocumentKind
DOCUMENT_KIND_POLICY: DocumentKind
DOCUMENT_KIND_ACCESS: DocumentKind

class VersionInfo(_message.Message):
    __slots__ = ("kind", "version", "digest", "author", "reason", "written_at", "diff", "restores")
    KIND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_AT_FIELD_NUMBER: _ClassVar[int]
    DIFF_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    kind: DocumentKind
    version: int
    digest: str
    author: str
    reason: str
    written_at: float
    diff: str
    restores: int
    def __init__(self, kind: _Optional[_Union[DocumentKind, str]] = ..., version: _Optional[int] = ..., digest: _Optional[str] = ..., author: _Optional[str] = ..., reason: _Optional[str] = ..., written_at: _Optional[float] = ..., diff: _Optional[str] = ..., restores: _Optional[int] = ...) -> None: ...

class Document(_message.Message):
    __slots__ = ("info", "text")
    INFO_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    info: VersionInfo
    text: str
    def __init__(self, info: _Optional[_Union[VersionInfo, _Mapping]] = ..., text: _Optional[str] = ...) -> None: ...

class GetDocumentRequest(_message.Message):
    __slots__ = ("kind", "version")
    KIND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    kind: DocumentKind
    version: int
    def __init__(self, kind: _Optional[_Union[DocumentKind, str]] = ..., version: _Optional[int] = ...) -> None: ...

class ApplyDocumentRequest(_message.Message):
    __slots__ = ("kind", "text", "author", "reason", "expected_version")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    kind: DocumentKind
    text: str
    author: str
    reason: str
    expected_version: int
    def __init__(self, kind: _Optional[_Union[DocumentKind, str]] = ..., text: _Optional[str] = ..., author: _Optional[str] = ..., reason: _Optional[str] = ..., expected_version: _Optional[int] = ...) -> None: ...

class RollBackRequest(_message.Message):
    __slots__ = ("kind", "version", "author", "reason")
    KIND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: DocumentKind
    version: int
    author: str
    reason: str
    def __init__(self, kind: _Optional[_Union[DocumentKind, str]] = ..., version: _Optional[int] = ..., author: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class SwitchSpeculationRequest(_message.Message):
    __slots__ = ("enabled", "model", "tenant", "draft_version", "percent", "author", "reason")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    model: str
    tenant: str
    draft_version: str
    percent: float
    author: str
    reason: str
    def __init__(self, enabled: _Optional[bool] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., draft_version: _Optional[str] = ..., percent: _Optional[float] = ..., author: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ListVersionsRequest(_message.Message):
    __slots__ = ("kind", "limit", "before")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    kind: DocumentKind
    limit: int
    before: int
    def __init__(self, kind: _Optional[_Union[DocumentKind, str]] = ..., limit: _Optional[int] = ..., before: _Optional[int] = ...) -> None: ...

class ListVersionsResponse(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[VersionInfo]
    def __init__(self, versions: _Optional[_Iterable[_Union[VersionInfo, _Mapping]]] = ...) -> None: ...

class ListAuditRequest(_message.Message):
    __slots__ = ("limit", "before")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    limit: int
    before: int
    def __init__(self, limit: _Optional[int] = ..., before: _Optional[int] = ...) -> None: ...

class ListAuditResponse(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[AuditEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[AuditEntry, _Mapping]]] = ...) -> None: ...

class AuditEntry(_message.Message):
    __slots__ = ("sequence", "at", "actor", "action", "target", "outcome", "detail")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    at: float
    actor: str
    action: str
    target: str
    outcome: str
    detail: str
    def __init__(self, sequence: _Optional[int] = ..., at: _Optional[float] = ..., actor: _Optional[str] = ..., action: _Optional[str] = ..., target: _Optional[str] = ..., outcome: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RouterState(_message.Message):
    __slots__ = ("router_id", "policy_version", "access_version", "error")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    ACCESS_VERSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    policy_version: int
    access_version: int
    error: str
    def __init__(self, router_id: _Optional[str] = ..., policy_version: _Optional[int] = ..., access_version: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("policy_version", "access_version", "routers", "store_error")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    ACCESS_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    STORE_ERROR_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    access_version: int
    routers: _containers.RepeatedCompositeFieldContainer[RouterState]
    store_error: str
    def __init__(self, policy_version: _Optional[int] = ..., access_version: _Optional[int] = ..., routers: _Optional[_Iterable[_Union[RouterState, _Mapping]]] = ..., store_error: _Optional[str] = ...) -> None: ...

class StartRolloutRequest(_message.Message):
    __slots__ = ("text", "author", "reason")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    text: str
    author: str
    reason: str
    def __init__(self, text: _Optional[str] = ..., author: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class GetRolloutRequest(_message.Message):
    __slots__ = ("rollout_id",)
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    def __init__(self, rollout_id: _Optional[str] = ...) -> None: ...

class ListRolloutsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListRolloutsResponse(_message.Message):
    __slots__ = ("rollouts",)
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[Rollout]
    def __init__(self, rollouts: _Optional[_Iterable[_Union[Rollout, _Mapping]]] = ...) -> None: ...

class ControlRolloutRequest(_message.Message):
    __slots__ = ("rollout_id", "command", "author", "reason")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    command: str
    author: str
    reason: str
    def __init__(self, rollout_id: _Optional[str] = ..., command: _Optional[str] = ..., author: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Rollout(_message.Message):
    __slots__ = ("rollout_id", "rule", "text", "author", "reason", "started_at", "revision", "phase", "step_index", "since", "percent", "is_pending", "why", "verdict", "results", "events", "num_canary", "num_control")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    IS_PENDING_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CANARY_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTROL_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    rule: str
    text: str
    author: str
    reason: str
    started_at: float
    revision: int
    phase: str
    step_index: int
    since: float
    percent: float
    is_pending: bool
    why: str
    verdict: str
    results: _containers.RepeatedCompositeFieldContainer[MetricResult]
    events: _containers.RepeatedCompositeFieldContainer[RolloutEvent]
    num_canary: int
    num_control: int
    def __init__(self, rollout_id: _Optional[str] = ..., rule: _Optional[str] = ..., text: _Optional[str] = ..., author: _Optional[str] = ..., reason: _Optional[str] = ..., started_at: _Optional[float] = ..., revision: _Optional[int] = ..., phase: _Optional[str] = ..., step_index: _Optional[int] = ..., since: _Optional[float] = ..., percent: _Optional[float] = ..., is_pending: _Optional[bool] = ..., why: _Optional[str] = ..., verdict: _Optional[str] = ..., results: _Optional[_Iterable[_Union[MetricResult, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[RolloutEvent, _Mapping]]] = ..., num_canary: _Optional[int] = ..., num_control: _Optional[int] = ...) -> None: ...

class MetricResult(_message.Message):
    __slots__ = ("metric", "verdict", "reason", "num_canary", "num_control", "estimate", "low", "high")
    METRIC_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CANARY_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTROL_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    metric: str
    verdict: str
    reason: str
    num_canary: int
    num_control: int
    estimate: float
    low: float
    high: float
    def __init__(self, metric: _Optional[str] = ..., verdict: _Optional[str] = ..., reason: _Optional[str] = ..., num_canary: _Optional[int] = ..., num_control: _Optional[int] = ..., estimate: _Optional[float] = ..., low: _Optional[float] = ..., high: _Optional[float] = ...) -> None: ...

class RolloutEvent(_message.Message):
    __slots__ = ("at", "phase", "step_index", "percent", "reason")
    AT_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    at: float
    phase: str
    step_index: int
    percent: float
    reason: str
    def __init__(self, at: _Optional[float] = ..., phase: _Optional[str] = ..., step_index: _Optional[int] = ..., percent: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class GetReportRequest(_message.Message):
    __slots__ = ("window", "by")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    window: str
    by: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, window: _Optional[str] = ..., by: _Optional[_Iterable[str]] = ...) -> None: ...

class GetReportResponse(_message.Message):
    __slots__ = ("window", "started_at", "ended_at", "by", "requests", "rows", "comparisons", "left_out")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COMPARISONS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    window: str
    started_at: float
    ended_at: float
    by: _containers.RepeatedScalarFieldContainer[str]
    requests: int
    rows: _containers.RepeatedCompositeFieldContainer[ReportRow]
    comparisons: _containers.RepeatedCompositeFieldContainer[ReportComparison]
    left_out: int
    def __init__(self, window: _Optional[str] = ..., started_at: _Optional[float] = ..., ended_at: _Optional[float] = ..., by: _Optional[_Iterable[str]] = ..., requests: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[ReportRow, _Mapping]]] = ..., comparisons: _Optional[_Iterable[_Union[ReportComparison, _Mapping]]] = ..., left_out: _Optional[int] = ...) -> None: ...

class ReportRow(_message.Message):
    __slots__ = ("values", "requests", "error_rate", "fallback_rate", "ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "tpot_p95_s", "itl_p95_s", "itl_p99_s", "acceptance_length", "accepted_per_position", "break_even", "explanation")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_RATE_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_RATE_FIELD_NUMBER: _ClassVar[int]
    TTFT_P50_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_P95_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_P50_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_P95_S_FIELD_NUMBER: _ClassVar[int]
    ITL_P95_S_FIELD_NUMBER: _ClassVar[int]
    ITL_P99_S_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    BREAK_EVEN_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    requests: int
    error_rate: float
    fallback_rate: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    itl_p95_s: float
    itl_p99_s: float
    acceptance_length: float
    accepted_per_position: _containers.RepeatedScalarFieldContainer[float]
    break_even: float
    explanation: str
    def __init__(self, values: _Optional[_Iterable[str]] = ..., requests: _Optional[int] = ..., error_rate: _Optional[float] = ..., fallback_rate: _Optional[float] = ..., ttft_p50_s: _Optional[float] = ..., ttft_p95_s: _Optional[float] = ..., tpot_p50_s: _Optional[float] = ..., tpot_p95_s: _Optional[float] = ..., itl_p95_s: _Optional[float] = ..., itl_p99_s: _Optional[float] = ..., acceptance_length: _Optional[float] = ..., accepted_per_position: _Optional[_Iterable[float]] = ..., break_even: _Optional[float] = ..., explanation: _Optional[str] = ...) -> None: ...

class ReportComparison(_message.Message):
    __slots__ = ("values", "variant", "ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95", "itl_p95", "itl_p99", "acceptance_length")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    TTFT_P50_FIELD_NUMBER: _ClassVar[int]
    TTFT_P95_FIELD_NUMBER: _ClassVar[int]
    TPOT_P50_FIELD_NUMBER: _ClassVar[int]
    TPOT_P95_FIELD_NUMBER: _ClassVar[int]
    ITL_P95_FIELD_NUMBER: _ClassVar[int]
    ITL_P99_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    variant: str
    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    tpot_p95: float
    itl_p95: float
    itl_p99: float
    acceptance_length: float
    def __init__(self, values: _Optional[_Iterable[str]] = ..., variant: _Optional[str] = ..., ttft_p50: _Optional[float] = ..., ttft_p95: _Optional[float] = ..., tpot_p50: _Optional[float] = ..., tpot_p95: _Optional[float] = ..., itl_p95: _Optional[float] = ..., itl_p99: _Optional[float] = ..., acceptance_length: _Optional[float] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("kind", "after_version")
    KIND_FIELD_NUMBER: _ClassVar[int]
    AFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    kind: DocumentKind
    after_version: int
    def __init__(self, kind: _Optional[_Union[DocumentKind, str]] = ..., after_version: _Optional[int] = ...) -> None: ...

class RouterReport(_message.Message):
    __slots__ = ("router_id", "acknowledgements", "records")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGEMENTS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    acknowledgements: _containers.RepeatedCompositeFieldContainer[Acknowledgement]
    records: _containers.RepeatedCompositeFieldContainer[FinishedRequest]
    def __init__(self, router_id: _Optional[str] = ..., acknowledgements: _Optional[_Iterable[_Union[Acknowledgement, _Mapping]]] = ..., records: _Optional[_Iterable[_Union[FinishedRequest, _Mapping]]] = ...) -> None: ...

class FinishedRequest(_message.Message):
    __slots__ = ("request_id", "age_s", "model", "tenant", "workload", "outcome", "temperature", "prompt_tokens", "output_tokens", "policy", "times", "guesses")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    age_s: float
    model: str
    tenant: str
    workload: str
    outcome: str
    temperature: float
    prompt_tokens: int
    output_tokens: int
    policy: FollowedPolicy
    times: RequestTimes
    guesses: RequestGuesses
    def __init__(self, request_id: _Optional[str] = ..., age_s: _Optional[float] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., workload: _Optional[str] = ..., outcome: _Optional[str] = ..., temperature: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., policy: _Optional[_Union[FollowedPolicy, _Mapping]] = ..., times: _Optional[_Union[RequestTimes, _Mapping]] = ..., guesses: _Optional[_Union[RequestGuesses, _Mapping]] = ...) -> None: ...

class FollowedPolicy(_message.Message):
    __slots__ = ("version", "since_version", "variant", "rule", "is_mixed")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SINCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    IS_MIXED_FIELD_NUMBER: _ClassVar[int]
    version: int
    since_version: int
    variant: str
    rule: str
    is_mixed: bool
    def __init__(self, version: _Optional[int] = ..., since_version: _Optional[int] = ..., variant: _Optional[str] = ..., rule: _Optional[str] = ..., is_mixed: _Optional[bool] = ...) -> None: ...

class RequestTimes(_message.Message):
    __slots__ = ("ttft_s", "tpot_s", "itl_p95_s", "itl_p99_s")
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    ITL_P95_S_FIELD_NUMBER: _ClassVar[int]
    ITL_P99_S_FIELD_NUMBER: _ClassVar[int]
    ttft_s: float
    tpot_s: float
    itl_p95_s: float
    itl_p99_s: float
    def __init__(self, ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., itl_p95_s: _Optional[float] = ..., itl_p99_s: _Optional[float] = ...) -> None: ...

class RequestGuesses(_message.Message):
    __slots__ = ("drafter", "draft_version", "fell_back", "acceptance_length", "verified_per_position", "accepted_per_position")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFT_VERSION_FIELD_NUMBER: _ClassVar[int]
    FELL_BACK_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    draft_version: str
    fell_back: bool
    acceptance_length: float
    verified_per_position: _containers.RepeatedScalarFieldContainer[int]
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, drafter: _Optional[str] = ..., draft_version: _Optional[str] = ..., fell_back: _Optional[bool] = ..., acceptance_length: _Optional[float] = ..., verified_per_position: _Optional[_Iterable[int]] = ..., accepted_per_position: _Optional[_Iterable[int]] = ...) -> None: ...

class Acknowledgement(_message.Message):
    __slots__ = ("kind", "version", "error")
    KIND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    kind: DocumentKind
    version: int
    error: str
    def __init__(self, kind: _Optional[_Union[DocumentKind, str]] = ..., version: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class ControlUpdate(_message.Message):
    __slots__ = ("documents",)
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    documents: _containers.RepeatedCompositeFieldContainer[Document]
    def __init__(self, documents: _Optional[_Iterable[_Union[Document, _Mapping]]] = ...) -> None: ...
