"""Which of the two ways a model directory is served: the Llama family's decoder, or transformers' own network."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from cluster.runtime.checkpoint import load_spec
from cluster.runtime.model import Model, context_length, load_model
from cluster.runtime.model_spec import ModelError, ModelSpec, UnsupportedModel
from cluster.runtime.sharding import check_shardable

logger = logging.getLogger(__name__)


def load_any_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    target_path: Path | None,
    max_model_len: int | None,
    batch_invariant: bool = False,
) -> Model:
    """Load a model directory for one device; see model.load_model and generic.loading. Raises ModelError."""
    try:
        return load_model(path, dtype, device, target_path, max_model_len, batch_invariant=batch_invariant)
    except UnsupportedModel as error:
        if batch_invariant:
            raise ModelError(f"batch_invariant: transformers' network does not promise it: {error}") from error
        logger.info("%s; it is served by transformers' network", error)
    from cluster.runtime.generic.loading import load_generic_model

    return load_generic_model(path, dtype, device, max_model_len)


def spec_for_ranks(path: Path, num_ranks: int, max_model_len: int) -> tuple[ModelSpec, int]:
    """The spec of a model that several ranks share, and the longest sequence. Reads config.json only.

    Raises ModelError for what the Llama family's decoder does not compute, and for more ranks than it has parts.
    """
    try:
        spec = load_spec(path)
        length = context_length(path, spec, max_model_len)
    except UnsupportedModel as error:
        raise ModelError(f"tensor_parallel must be 1 for what transformers' network serves: {error}") from error
    check_shardable(spec, num_ranks)
    return spec, length
