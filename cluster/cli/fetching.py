"""Getting a configuration's models before they are needed."""

from __future__ import annotations

from pathlib import Path

from cluster.cli.common import die, errors
from cluster.config import ClusterConfig, PoolConfig


def fetch_models(config: ClusterConfig) -> None:
    """Fetch every model that is not here yet; ends the command if one cannot be had, or not be sharded as asked."""
    pools: list[PoolConfig] = [pool for model in config.models for pool in (model.target, model.draft) if pool]
    for pool in pools:
        _check_ranks(resolve(pool.path), pool)


def resolve(name: str) -> Path:
    """Where a model is, fetched if need be; ends the command if it cannot be had."""
    from cluster.runtime.fetch_progress import show_progress
    from cluster.runtime.model_spec import ModelError
    from cluster.runtime.model_store import resolve_model

    try:
        with show_progress(errors) as progress:
            return resolve_model(name, progress)
    except ModelError as error:
        die(str(error))


def _check_ranks(path: Path, pool: PoolConfig) -> None:
    """Refuse early what every rank would refuse."""
    if pool.tensor_parallel == 1:
        return
    from cluster.runtime.any_model import spec_for_ranks
    from cluster.runtime.model_spec import ModelError

    try:
        spec_for_ranks(path, pool.tensor_parallel, pool.max_model_len)
    except ModelError as error:
        die(f"{path}: {error}")
