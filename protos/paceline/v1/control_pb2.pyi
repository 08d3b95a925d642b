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

class WatchRequest(_message.Message):
    __slots__ = ("kind", "after_version")
    KIND_FIELD_NUMBER: _ClassVar[int]
    AFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    kind: DocumentKind
    after_version: int
    def __init__(self, kind: _Optional[_Union[DocumentKind, str]] = ..., after_version: _Optional[int] = ...) -> None: ...

class RouterReport(_message.Message):
    __slots__ = ("router_id", "acknowledgements")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGEMENTS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    acknowledgements: _containers.RepeatedCompositeFieldContainer[Acknowledgement]
    def __init__(self, router_id: _Optional[str] = ..., acknowledgements: _Optional[_Iterable[_Union[Acknowledgement, _Mapping]]] = ...) -> None: ...

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
