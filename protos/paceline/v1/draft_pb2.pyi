from protos.paceline.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Open(_message.Message):
    __slots__ = ("request_id", "epoch", "token_ids", "sampling", "draft_len", "tenant", "num_prompt_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LEN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    draft_len: int
    tenant: str
    num_prompt_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., draft_len: _Optional[int] = ..., tenant: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("request_id", "epoch", "base_len", "token_ids", "draft_len", "min_confidence", "longest_draft_len")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LEN_FIELD_NUMBER: _ClassVar[int]
    MIN_CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    LONGEST_DRAFT_LEN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    base_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_len: int
    min_confidence: float
    longest_draft_len: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., base_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., draft_len: _Optional[int] = ..., min_confidence: _Optional[float] = ..., longest_draft_len: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class DraftCommand(_message.Message):
    __slots__ = ("open", "committed", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: Open
    committed: Committed
    close: Close
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class DraftCommands(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[DraftCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[DraftCommand, _Mapping]]] = ...) -> None: ...

class DraftEvent(_message.Message):
    __slots__ = ("block", "refusal", "load")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    block: _common_pb2.DraftBlock
    refusal: _common_pb2.Refusal
    load: _common_pb2.PoolLoad
    def __init__(self, block: _Optional[_Union[_common_pb2.DraftBlock, _Mapping]] = ..., refusal: _Optional[_Union[_common_pb2.Refusal, _Mapping]] = ..., load: _Optional[_Union[_common_pb2.PoolLoad, _Mapping]] = ...) -> None: ...

class DraftEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[DraftEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[DraftEvent, _Mapping]]] = ...) -> None: ...
