"""Engines from configuration: a model's runner joined with the scheduling that drives it."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from cluster.config import Device, PoolConfig, SpeculationConfig
from cluster.core.block_pool import BlockPool
from cluster.core.draft_length import DraftLengthConfig, DraftLengthController
from cluster.core.draft_scheduler import DraftSchedulerConfig
from cluster.core.kv_cache import KVCacheManager
from cluster.core.scheduler import Scheduler, SchedulerConfig
from cluster.core.tactics import tactics_for
from cluster.grammar.compiler import GrammarCompiler
from cluster.runtime.drafter import DraftEngine
from cluster.runtime.engine import Engine
from cluster.runtime.engine_loop import EngineLoop
from cluster.runtime.grammar_library import GrammarLibrary
from cluster.runtime.leader import TensorParallelRunner, build_tensor_parallel_runner
from cluster.runtime.model_runner import ModelRunner, build_runner
from cluster.runtime.model_store import resolve_model
from cluster.runtime.rank_processes import RankProcesses
from cluster.runtime.ranks import Launcher
from cluster.tokenizer import Tokenizer

EngineT = TypeVar("EngineT", bound=EngineLoop[Any, Any])

logger = logging.getLogger(__name__)

_IDLE_AFTER_S = 5.0  # longer than a target that wants no guesses takes for as many tokens as its router keeps back


def load_engine(
    pool: PoolConfig, speculation: SpeculationConfig, device: Device, launch: Launcher = RankProcesses
) -> Engine:
    """A target replica's engine with its model loaded, not started.

    launch: starts the other ranks of a tensor-parallel replica. Raises ModelError if the model cannot be served.
    """
    runner = _load_runner(pool, device, None, launch)
    return owning(target_engine(runner, pool, speculation, grammar_library(runner, pool.path)), runner)


def load_draft_engine(
    pool: PoolConfig, target_path: str, device: Device, launch: Launcher = RankProcesses
) -> DraftEngine:
    """A draft replica's engine with its model loaded, not started; `target_path` is where a shared embedding is from.

    launch: see load_engine. Raises ModelError if the model cannot be served.
    """
    runner = _load_runner(pool, device, target_path, launch)
    return owning(draft_engine(runner, pool, grammar_library(runner, target_path)), runner)


def _load_runner(pool: PoolConfig, device: Device, target_path: str | None, launch: Launcher) -> ModelRunner:
    if pool.tensor_parallel == 1:
        return build_runner(pool, device, target_path)
    return build_tensor_parallel_runner(pool, device, target_path, launch)


def owning(engine: EngineT, runner: ModelRunner) -> EngineT:
    """An engine that ends with its ranks, and they with it."""
    if isinstance(runner, TensorParallelRunner):
        runner.leader.on_lost = engine.abandon
        engine.on_closed = runner.leader.close
    return engine


def grammar_library(runner: ModelRunner, target_path: str) -> GrammarLibrary:
    """Grammars over the target's tokens, whose tokenizer is loaded meanwhile."""

    def load() -> GrammarCompiler:
        vocabulary = Tokenizer.load(resolve_model(target_path)).vocabulary
        return GrammarCompiler(vocabulary.pieces, vocabulary.special_ids, runner.eos_token_ids, runner.vocab_size)

    return GrammarLibrary(load)


def target_engine(
    runner: ModelRunner, pool: PoolConfig, speculation: SpeculationConfig, grammars: GrammarLibrary | None = None
) -> Engine:
    """Join a runner with the target's scheduler."""
    config = SchedulerConfig(
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        max_model_len=_max_model_len(runner, pool),
        max_queued=pool.max_queued,
        vocab_size=runner.vocab_size,
        eos_token_ids=runner.eos_token_ids,
        hold=speculation.hold,
        max_hold_s=speculation.max_hold_ms / 1000,
    )
    tactics = tactics_for(speculation.draft_length, speculation.hold)
    lengths = DraftLengthConfig(speculation.draft_length, tactics=tactics, max_arrival_s=config.max_hold_s)
    scheduler = Scheduler(config, _kv_cache(runner, pool), DraftLengthController(lengths))
    return Engine(scheduler, runner, grammars=grammars)


def _kv_cache(runner: ModelRunner, pool: PoolConfig) -> KVCacheManager:
    return KVCacheManager(BlockPool(runner.num_blocks), runner.block_size, pool.prefix_cache)


def _max_model_len(runner: ModelRunner, pool: PoolConfig) -> int:
    """Tokens of the longest sequence: what configuration and model allow, or what fits all of the KV blocks."""
    num_slots = runner.num_blocks * runner.block_size
    if num_slots < runner.max_model_len:
        logger.warning(
            "%s: %d KV blocks limit sequences to %d tokens, not %d; raise kv_blocks or kv_memory_fraction",
            pool.path, runner.num_blocks, num_slots, runner.max_model_len,
        )  # fmt: skip
    else:
        logger.info("%s: sequences have at most %d tokens", pool.path, runner.max_model_len)
    return min(runner.max_model_len, num_slots)


def draft_engine(runner: ModelRunner, pool: PoolConfig, grammars: GrammarLibrary | None = None) -> DraftEngine:
    """Join a runner with draft sessions."""
    config = DraftSchedulerConfig(
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        max_model_len=runner.max_model_len,
        max_sessions=pool.max_num_seqs + pool.max_queued,
        vocab_size=runner.vocab_size,
        eos_token_ids=runner.eos_token_ids,
        idle_after_s=_IDLE_AFTER_S,
    )
    return DraftEngine(runner, _kv_cache(runner, pool), config, grammars=grammars)
