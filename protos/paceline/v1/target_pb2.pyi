from protos.paceline.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Submit(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "max_draft_tokens", "output_token_ids", "priority", "deadline_s", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    max_draft_tokens: int
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    priority: int
    deadline_s: float
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., max_draft_tokens: _Optional[int] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., priority: _Optional[int] = ..., deadline_s: _Optional[float] = ..., tenant: _Optional[str] = ...) -> None: ...

class SetDraftLimit(_message.Message):
    __slots__ = ("request_id", "max_draft_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    max_draft_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., max_draft_tokens: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class TargetCommand(_message.Message):
    __slots__ = ("submit", "propose", "abort", "set_draft_limit")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    SET_DRAFT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    propose: _common_pb2.DraftBlock
    abort: Abort
    set_draft_limit: SetDraftLimit
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., propose: _Optional[_Union[_common_pb2.DraftBlock, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., set_draft_limit: _Optional[_Union[SetDraftLimit, _Mapping]] = ...) -> None: ...

class TargetCommands(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[TargetCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[TargetCommand, _Mapping]]] = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("queue_s", "step_s", "held_s", "round_trip_s", "draft_time_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    HELD_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TIME_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    step_s: float
    held_s: float
    round_trip_s: float
    draft_time_s: float
    def __init__(self, queue_s: _Optional[float] = ..., step_s: _Optional[float] = ..., held_s: _Optional[float] = ..., round_trip_s: _Optional[float] = ..., draft_time_s: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("request_id", "base_len", "token_ids", "next_draft_len", "num_draft_tokens", "num_accepted_tokens", "finish_reason", "logprobs", "timings", "num_cached_tokens", "longest_draft_len", "min_confidence")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_DRAFT_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_DRAFT_LEN_FIELD_NUMBER: _ClassVar[int]
    MIN_CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    base_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    next_draft_len: int
    num_draft_tokens: int
    num_accepted_tokens: int
    finish_reason: _common_pb2.FinishReason
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    timings: StepTimings
    num_cached_tokens: int
    longest_draft_len: int
    min_confidence: float
    def __init__(self, request_id: _Optional[str] = ..., base_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., next_draft_len: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., timings: _Optional[_Union[StepTimings, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., longest_draft_len: _Optional[int] = ..., min_confidence: _Optional[float] = ...) -> None: ...

class TargetEvent(_message.Message):
    __slots__ = ("commit", "refusal", "load")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    commit: Commit
    refusal: _common_pb2.Refusal
    load: _common_pb2.PoolLoad
    def __init__(self, commit: _Optional[_Union[Commit, _Mapping]] = ..., refusal: _Optional[_Union[_common_pb2.Refusal, _Mapping]] = ..., load: _Optional[_Union[_common_pb2.PoolLoad, _Mapping]] = ...) -> None: ...

class TargetEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[TargetEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[TargetEvent, _Mapping]]] = ...) -> None: ...
