"""Where marks are stamped: wrappers around what an engine drives and around a stream's codec, put on when tracing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cluster.core.step import SchedulerOutput, SchedulerStats, StepOutput, StepStats
from cluster.messages.rounds import Refusal, RefusalReason
from cluster.router.router import Connectors
from cluster.runtime.engine_loop import EngineLoop
from cluster.runtime.input_batch import InputBatch
from cluster.runtime.kv_store import KVCache
from cluster.runtime.model import Model, ServedSpec
from cluster.runtime.model_runner import ModelRunner
from cluster.runtime.work import Runner, ShouldStop, Work, never
from cluster.tracing.marks import Place, TraceLog
from cluster.transport.codec import Frame
from cluster.transport.draft_stream import DRAFT_PROTOCOL
from cluster.transport.grpc_stream import GrpcStream
from cluster.transport.hub import PoolHub
from cluster.transport.protocol import CommandT, EventT, PoolProtocol
from cluster.transport.target_stream import TARGET_PROTOCOL


@dataclass(frozen=True, slots=True)
class PoolPlaces:
    """One pool's places, in the order of a round."""

    received: Place
    taken: Place
    step: Place
    forward: Place
    logits: Place
    sampled: Place
    applied: Place
    emitted: Place
    sent: Place


TARGET_PLACES = PoolPlaces(
    Place.TARGET_RECEIVED,
    Place.TARGET_TAKEN,
    Place.TARGET_STEP,
    Place.TARGET_FORWARD,
    Place.TARGET_LOGITS,
    Place.TARGET_SAMPLED,
    Place.TARGET_APPLIED,
    Place.TARGET_EMITTED,
    Place.TARGET_SENT,
)
DRAFT_PLACES = PoolPlaces(
    Place.DRAFT_RECEIVED,
    Place.DRAFT_TAKEN,
    Place.DRAFT_STEP,
    Place.DRAFT_FORWARD,
    Place.DRAFT_LOGITS,
    Place.DRAFT_SAMPLED,
    Place.DRAFT_APPLIED,
    Place.DRAFT_EMITTED,
    Place.DRAFT_SENT,
)


def trace_pool(
    engine: EngineLoop[CommandT, EventT], hub: PoolHub[CommandT, EventT], places: PoolPlaces, log: TraceLog
) -> None:
    """Stamp what passes through a replica from now on; before its engine starts and its first router connects."""
    hub.protocol = trace_protocol(hub.protocol, log, encoded=places.sent, decoded=places.received)
    publish = engine.on_events

    def emit(events: list[Any]) -> None:
        _mark_messages(log, places.emitted, events)
        if publish is not None:
            publish(events)

    engine.on_events = emit
    steps = _Steps(log)
    engine.wrap(
        lambda work: _TracedWork(work, places, steps),
        lambda runner: _TracedRunner(_inside(runner, places, steps), places, steps),
    )


def trace_connectors(log: TraceLog) -> Connectors:
    """A router's streams to replicas, over gRPC, that stamp what passes."""
    target = _as_router(TARGET_PROTOCOL, log, sent=Place.ROUTER_PROPOSED, received=Place.ROUTER_COMMIT)
    draft = _as_router(DRAFT_PROTOCOL, log, sent=Place.ROUTER_ASKED, received=Place.ROUTER_BLOCK)
    return Connectors(
        target=lambda info: GrpcStream(target, info.address), draft=lambda info: GrpcStream(draft, info.address)
    )


def _as_router(
    protocol: PoolProtocol[CommandT, EventT], log: TraceLog, sent: Place, received: Place
) -> PoolProtocol[CommandT, EventT]:
    return replace(
        protocol,
        encode_command=_encoding(protocol.encode_command, log, sent),
        decode_events=_decoding(protocol.decode_events, log, received),
    )


def trace_protocol(
    protocol: PoolProtocol[CommandT, EventT], log: TraceLog, encoded: Place, decoded: Place
) -> PoolProtocol[CommandT, EventT]:
    """A replica's side."""
    return replace(
        protocol,
        encode_event=_encoding(protocol.encode_event, log, encoded),
        decode_commands=_decoding(protocol.decode_commands, log, decoded),
    )


def _encoding(encode: Callable[[Any], bytes], log: TraceLog, place: Place) -> Callable[[Any], bytes]:
    def encode_and_mark(message: Any) -> bytes:
        part = encode(message)
        log.pass_message(place, message)
        return part

    return encode_and_mark


def _decoding(decode: Callable[[bytes], Frame[Any]], log: TraceLog, place: Place) -> Callable[[bytes], Frame[Any]]:
    def decode_and_mark(data: bytes) -> Frame[Any]:
        frame = decode(data)
        _mark_messages(log, place, frame.messages)
        return frame

    return decode_and_mark


def _mark_messages(log: TraceLog, place: Place, messages: Sequence[Any]) -> None:
    for message in messages:
        log.pass_message(place, message)


class _Steps:
    """Owns which sequences the engine's step runs. The engine's thread only."""

    def __init__(self, log: TraceLog) -> None:
        self.log = log
        self._step = SchedulerOutput()

    def begin(self, step: SchedulerOutput, place: Place) -> None:
        self._step = step
        self.mark(place)

    def mark(self, place: Place) -> None:
        """Mark each sequence with what it has committed, as far as this step reads it."""
        for item in self._step.scheduled:
            num_rows = len(item.token_ids)
            self.log.mark(place, item.request_id, item.start + num_rows - item.num_draft_tokens, num_rows)


def _inside(runner: Runner, places: PoolPlaces, steps: _Steps) -> Runner:
    """Tell forward from sampling, in runners that have a model."""
    if isinstance(runner, ModelRunner):
        runner.wrap_model(lambda model: _TracedModel(model, places, steps))
    return runner


class _TracedRunner:
    """A runner that stamps the begin and the end of each step."""

    def __init__(self, runner: Runner, places: PoolPlaces, steps: _Steps) -> None:
        self._runner = runner
        self._places = places
        self._steps = steps

    def execute(self, step: SchedulerOutput, should_stop: ShouldStop = never) -> StepOutput:
        self._steps.begin(step, self._places.step)
        output = self._runner.execute(step, should_stop)
        self._steps.mark(self._places.sampled)
        return output


class _TracedModel:
    """A model that stamps the begin and the end of each forward pass; on a GPU, of its launch."""

    def __init__(self, model: Model, places: PoolPlaces, steps: _Steps) -> None:
        self._model = model
        self._places = places
        self._steps = steps

    @property
    def spec(self) -> ServedSpec:
        return self._model.spec

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def max_model_len(self) -> int:
        return self._model.max_model_len

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes

    @property
    def output_token_ids(self) -> Tensor | None:
        return self._model.output_token_ids

    def forward(self, batch: InputBatch, kv: KVCache) -> Tensor:
        self._steps.mark(self._places.forward)
        logits = self._model.forward(batch, kv)
        self._steps.mark(self._places.logits)
        return logits


class _TracedWork:
    """Work that stamps commands as the engine takes them, and steps as their results are in."""

    def __init__(self, work: Work[Any, Any], places: PoolPlaces, steps: _Steps) -> None:
        self._work = work
        self._places = places
        self._steps = steps

    def handle(self, command: Any, now: float) -> None:
        self._steps.log.pass_message(self._places.taken, command)
        self._work.handle(command, now)

    def apply(self, step: SchedulerOutput, output: StepOutput, now: float, step_s: float) -> StepStats:
        stats = self._work.apply(step, output, now, step_s)
        self._steps.mark(self._places.applied)
        return stats

    # --- as it is ---

    @property
    def is_draining(self) -> bool:
        return self._work.is_draining

    @is_draining.setter
    def is_draining(self, value: bool) -> None:
        self._work.is_draining = value

    @property
    def is_idle(self) -> bool:
        return self._work.is_idle

    def refusal_of(self, command: Any, reason: RefusalReason, message: str) -> Refusal | None:
        return self._work.refusal_of(command, reason, message)

    def refuse(self, command: Any, reason: RefusalReason, message: str) -> None:
        self._work.refuse(command, reason, message)

    def refuse_all(self, reason: RefusalReason, message: str) -> None:
        self._work.refuse_all(reason, message)

    def schedule(self, now: float) -> SchedulerOutput:
        return self._work.schedule(now)

    def fail(self, step: SchedulerOutput, message: str) -> None:
        self._work.fail(step, message)

    def take_events(self) -> list[Any]:
        return self._work.take_events()

    def stats(self) -> SchedulerStats:
        return self._work.stats()
