"""The OpenAI-compatible HTTP API over any inference backend."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from openai.types import Model
from starlette.exceptions import HTTPException

from cluster.messages.request import GenerateRequest
from cluster.transport.backend import InferenceBackend
from cluster.transport.caller import Caller
from cluster.transport.connection import WhileConnected, read_body
from cluster.transport.grammar_checks import GrammarChecks
from cluster.transport.openai_answer import Generation
from cluster.transport.openai_errors import add_error_handlers
from cluster.transport.openai_objects import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    Identity,
)
from cluster.transport.openai_schema import ChatCompletionRequest, CompletionRequest, OpenAIFields, Prompt
from cluster.transport.prompts import ServedModel, served_model
from cluster.transport.readiness import Readiness
from cluster.transport.validation import parse_json

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """What the API serves beside inference (None is a 404), and its limits."""

    metrics: Callable[[], bytes] | None = None  # this process's metrics in Prometheus' text format
    service_discovery: Callable[[], Sequence[Mapping[str, object]]] | None = None  # for Prometheus: where metrics are
    max_body_bytes: int = 4 * 1024 * 1024


def create_app(backend: Callable[[], InferenceBackend], options: ApiOptions | None = None) -> FastAPI:
    """The application. `backend` is called for each request, so that it may come to life after the app is built."""
    api = OpenAIApi(backend, options or ApiOptions())
    app = FastAPI(title="Paceline", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_api_route("/v1/chat/completions", api.chat_completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", api.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", api.list_models, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models/{name:path}", api.get_model, methods=["GET"], response_model=None)
    app.add_api_route("/health", api.health, methods=["GET"], response_model=None)
    app.add_api_route("/ready", api.ready, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", api.metrics, methods=["GET"], response_model=None)
    app.add_api_route("/sd/prometheus", api.service_discovery, methods=["GET"], response_model=None)
    add_error_handlers(app)
    return app


class OpenAIApi:
    """Owns the route handlers."""

    def __init__(self, backend: Callable[[], InferenceBackend], options: ApiOptions) -> None:
        self._backend = backend
        self._options = options
        self._grammars = GrammarChecks()
        self._readiness = Readiness(backend)
        self._created = int(time.time())

    async def chat_completions(self, request: Request) -> Response:
        backend = self._backend()
        caller = Caller.from_headers(request.headers, backend.key_holder)
        fields = parse_json(ChatCompletionRequest, await read_body(request, self._options.max_body_bytes))
        caller = caller.with_keys(fields.user)
        model = served_model(backend, fields.model)
        await self._grammars.check(model.name, model.tokenizer, fields)
        token_ids = await model.encode_chat(fields.conversation(), "messages")
        identity = _identity("chatcmpl", fields)
        submitted = model.choices(identity.id, fields, token_ids, caller, "messages")
        return _respond(fields, ChatAnswer(identity, model.tokenizer), backend, submitted)

    async def completions(self, request: Request) -> Response:
        backend = self._backend()
        caller = Caller.from_headers(request.headers, backend.key_holder)
        fields = parse_json(CompletionRequest, await read_body(request, self._options.max_body_bytes))
        caller = caller.with_keys(fields.user)
        model = served_model(backend, fields.model)
        await self._grammars.check(model.name, model.tokenizer, fields)
        identity = _identity("cmpl", fields)
        submitted, echoes = [], []
        for index, prompt in enumerate(fields.prompt):
            param = "prompt" if len(fields.prompt) == 1 else f"prompt[{index}]"
            token_ids = await model.encode_prompt(prompt, param)
            submitted += model.choices(f"{identity.id}-{index}", fields, token_ids, caller, param)
            echo = _text(prompt, model) if fields.echo else ""
            echoes += [echo] * fields.num_choices
        return _respond(fields, CompletionAnswer(identity, model.tokenizer, echoes), backend, submitted)

    async def list_models(self, request: Request) -> Response:
        backend = self._backend()
        Caller.from_headers(request.headers, backend.key_holder)
        data = [self._model(name) for name in backend.models()]
        return JSONResponse({"object": "list", "data": data})

    async def get_model(self, name: str, request: Request) -> Response:
        backend = self._backend()
        Caller.from_headers(request.headers, backend.key_holder)
        return JSONResponse(self._model(served_model(backend, name).name))

    async def health(self) -> Response:
        ready = self._backend().ready()
        return JSONResponse({"status": "ok" if ready else "unavailable"}, 200 if ready else 503)

    async def ready(self) -> Response:
        problem = await self._readiness.problem()
        if problem is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable", "reason": problem}, 503)

    async def metrics(self) -> Response:
        if self._options.metrics is None:
            raise HTTPException(404)
        return Response(self._options.metrics(), media_type=PROMETHEUS_TEXT)

    async def service_discovery(self) -> Response:
        if self._options.service_discovery is None:
            raise HTTPException(404)
        return JSONResponse(list(self._options.service_discovery()))

    def _model(self, name: str) -> dict[str, object]:
        return Model(id=name, created=self._created, object="model", owned_by="paceline").to_dict()


def _identity(prefix: str, fields: OpenAIFields) -> Identity:
    return Identity(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=fields.model,
        with_logprobs=fields.num_logprobs is not None,
    )


def _text(prompt: Prompt, model: ServedModel) -> str:
    return prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt)


def _respond(
    fields: OpenAIFields, answer: Answer, backend: InferenceBackend, submitted: Sequence[GenerateRequest]
) -> Response:
    """Nothing is generated before the response is called, so that a client that has gone costs nothing."""
    generation = Generation(answer, backend, tuple(submitted), fields.num_choices, fields.include_usage)
    return WhileConnected(generation.send_stream if fields.stream else generation.send_whole)
