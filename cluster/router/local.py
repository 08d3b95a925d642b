"""The whole system in one process: engines in their threads, loopback streams instead of gRPC, the same router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Self
from uuid import uuid4

from cluster.config import ClusterConfig, ModelConfig
from cluster.messages.request import GenerateRequest, SamplingParams, SpeculationOverride
from cluster.messages.rounds import DraftCommand, DraftEvent, TargetCommand, TargetEvent
from cluster.router.observer import NullObserver, RouterObserver
from cluster.router.replica_set import Pool, ReplicaInfo
from cluster.router.router import Connectors, Router
from cluster.runtime.drafter import DraftEngine
from cluster.runtime.engine import Engine
from cluster.runtime.factory import load_draft_engine, load_engine
from cluster.runtime.model_store import resolve_model
from cluster.tokenizer import Tokenizer
from cluster.transport.draft_stream import DRAFT_PROTOCOL
from cluster.transport.hub import PoolHub
from cluster.transport.loopback import LoopbackStream
from cluster.transport.target_stream import TARGET_PROTOCOL


@dataclass(frozen=True, slots=True)
class LocalModel:
    """One model's engines, loaded and not started, and its tokenizer."""

    target: Engine
    draft: DraftEngine | None
    tokenizer: Tokenizer


def load_local_model(model: ModelConfig, config: ClusterConfig) -> LocalModel:
    """Load a model's pools into this process. Raises ModelError."""
    draft = None if model.draft is None else load_draft_engine(model.draft, model.target.path, config.device)
    target = load_engine(model.target, config.speculation, config.device)
    return LocalModel(target, draft, Tokenizer.load(resolve_model(model.target.path)))


class LocalSystem:
    """Owns a router and the engines behind it. Use as an async context manager: it starts and stops them."""

    def __init__(
        self, config: ClusterConfig, models: Mapping[str, LocalModel], observer: RouterObserver | None = None
    ) -> None:
        self._models = models
        self._target_hubs: dict[str, PoolHub[TargetCommand, TargetEvent]] = {}
        self._draft_hubs: dict[str, PoolHub[DraftCommand, DraftEvent]] = {}
        self.router = Router(
            config,
            {name: model.tokenizer for name, model in models.items()},
            self._discover,
            observer or NullObserver(),
            connectors=Connectors(
                target=lambda info: LoopbackStream(self._target_hubs[info.model]),
                draft=lambda info: LoopbackStream(self._draft_hubs[info.model]),
            ),
        )

    async def __aenter__(self) -> Self:
        for name, model in self._models.items():
            self._target_hubs[name] = target_hub = PoolHub(TARGET_PROTOCOL)
            target_hub.bind(model.target)
            model.target.on_events = target_hub.publish
            model.target.start()
            if model.draft is not None:
                self._draft_hubs[name] = draft_hub = PoolHub(DRAFT_PROTOCOL)
                draft_hub.bind(model.draft)
                model.draft.on_events = draft_hub.publish
                model.draft.start()
        await self.router.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.router.stop()
        for model in self._models.values():
            for engine in (model.target, model.draft):
                if engine is not None:
                    await asyncio.to_thread(engine.stop)

    async def _discover(self) -> list[ReplicaInfo]:
        targets = [
            ReplicaInfo(
                f"{name}-target", "in-process", name, Pool.TARGET, max_model_len=self._models[name].target.max_model_len
            )
            for name in self._target_hubs
        ]
        drafts = [ReplicaInfo(f"{name}-draft", "in-process", name, Pool.DRAFT) for name in self._draft_hubs]
        return targets + drafts


async def generate_text(
    config: ClusterConfig,
    model: str,
    prompt: str,
    sampling: SamplingParams,
    speculation: SpeculationOverride,
    write: Callable[[str], None],
) -> None:
    """Answer one chat prompt in this process, writing text as it comes. Raises ModelError, RequestError."""
    served = next(item for item in config.models if item.name == model)
    local = LocalSystem(config, {model: load_local_model(served, config)})
    async with local:
        token_ids = local.router.tokenizer(model).apply_chat_template([{"role": "user", "content": prompt}])
        request = GenerateRequest(f"local-{uuid4().hex}", model, token_ids, sampling, speculation=speculation)
        async with aclosing(local.router.generate(request)) as deltas:
            async for delta in deltas:
                write(delta.text)
