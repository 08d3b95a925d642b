"""Reads a model directory for the generic path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from cluster.runtime.checkpoint import Checkpoint, read_config
from cluster.runtime.generic.model import GenericModel
from cluster.runtime.generic.pager import IMPLEMENTATION, register
from cluster.runtime.generic.refusals import refuse_unknown, refuse_unservable
from cluster.runtime.model_spec import ModelError, parse_eos


def load_generic_model(path: Path, dtype: torch.dtype, device: torch.device, max_model_len: int | None) -> GenericModel:
    """Load a directory in transformers' format, of any decoder-only family. Raises ModelError for what is not served.

    dtype: of the matrices; int8 quantises them, but for embeddings. Only safetensors are read, and only transformers'
    own code is run. Sequences can have at most max_model_len tokens, or as many as the model's positions allow.
    """
    fields = read_config(path)
    try:
        refuse_unknown(fields)
        config = _config(path)
        length = _context_length(config, max_model_len)
        refuse_unservable(config, length)
        network = _network(path, config, "auto" if dtype == torch.int8 else dtype).to(device)
        model = GenericModel(network, dtype, parse_eos(fields), length, device)
        model.check_memory()
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    return model


def _config(path: Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each family validates in its own way
        raise ModelError(f"config.json is not usable: {error}") from error


def _context_length(config: PretrainedConfig, max_model_len: int | None) -> int:
    """The smaller of what is asked for and what the model has positions for."""
    own = config.to_dict().get(config.attribute_map.get("max_position_embeddings", "max_position_embeddings"))
    limits = [limit for limit in (own, max_model_len) if limit is not None]
    if not limits:
        raise ModelError("config.json has no max_position_embeddings: set max_model_len")
    return int(min(limits))


def _network(path: Path, config: PretrainedConfig, dtype: torch.dtype | str) -> Any:
    """The network in the given dtype, or in the checkpoint's own ("auto")."""
    with Checkpoint(path):
        pass  # its complaints about missing and damaged files are the clearer ones
    register()
    try:
        network, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises anything at all, also for a family that needs a missing package
        raise ModelError(f"transformers cannot build it: {error}") from error
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if names := sorted(map(str, report[kind])):
            raise ModelError(f"{kind.replace('_keys', '')} tensor {names[0]} ({len(names)} such)")
    if hasattr(network, "set_experts_implementation"):
        network.set_experts_implementation("eager")  # the others sum in orders of their own
    return network.eval().requires_grad_(False)
