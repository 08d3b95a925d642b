"""The draft's engine: guesses what the target will say, one batched step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.core.draft_scheduler import DraftScheduler, DraftSchedulerConfig
from cluster.core.grammar import Grammars
from cluster.core.kv_cache import KVCacheManager
from cluster.core.step import StepStats
from cluster.messages.rounds import DraftCommand, DraftEvent
from cluster.runtime.engine_loop import EngineLoop
from cluster.runtime.work import Runner


class DraftEngine(EngineLoop[DraftCommand, DraftEvent]):
    """A draft replica's engine: Open, Committed and Close in; DraftBlock, Refusal and PoolLoad out."""

    def __init__(
        self,
        runner: Runner,
        kv: KVCacheManager,
        config: DraftSchedulerConfig,
        on_events: Callable[[list[DraftEvent]], None] | None = None,
        on_step: Callable[[StepStats], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
    ) -> None:
        """`grammars`: without it, guesses are made without regard to them."""
        super().__init__(DraftScheduler(config, kv, grammars), runner, on_events, on_step, clock)
