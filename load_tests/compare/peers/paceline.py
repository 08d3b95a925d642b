"""Paceline itself: `paceline serve` of this very installation, the whole cluster."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from cluster.config import ClusterConfig, ControlConfig, ModelConfig, PoolConfig, Quantization, RouterConfig
from load_tests.bench import free_port
from load_tests.compare.peers.base import Arm, Conditions, Drafting, Say, ServerCommand, Weights
from load_tests.compare.workload import Ask

_MODEL = "model"
_SERVE = "from cluster.cli import app; app()"
_BLOCK_SIZE = 16
_QUANTIZATIONS = {Weights.BFLOAT16: Quantization.NONE, Weights.INT8: Quantization.INT8}


class Paceline:
    """Its defaults for speculation; a draft pool only where a draft model guesses. No prefix cache, as everywhere."""

    def prepare(self, conditions: Conditions, say: Say) -> None:
        """Nothing to do: it is what runs this program."""

    def server_of(self, arm: Arm) -> Arm:
        return replace(arm, drafting=Drafting.NONE) if arm.drafting is Drafting.NGRAM else arm

    def command(self, arm: Arm, conditions: Conditions, port: int) -> ServerCommand:
        config = cluster_config(arm, conditions, port)
        path = conditions.cache / "paceline" / f"{port}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config.model_dump_json())  # JSON is YAML
        return ServerCommand((sys.executable, "-c", _SERVE, "serve", "--config", str(path)), {}, "/health")

    def body(self, arm: Arm, ask: Ask) -> dict[str, object]:
        guesses = {"enabled": True, "drafter": "model" if arm.drafting is Drafting.MODEL else "ngram"}
        return {
            "model": _MODEL,
            "prompt": list(ask.prompt_token_ids),
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "speculation": {"enabled": False} if arm.drafting is Drafting.NONE else guesses,
        }


def cluster_config(arm: Arm, conditions: Conditions, port: int) -> ClusterConfig:
    """Of an arm: KV for every stream at full length, and speculation as it is by default."""
    target = _pool(conditions, conditions.model, quantization=_QUANTIZATIONS[arm.weights])
    draft = _pool(conditions, conditions.draft, Quantization.INT8) if arm.drafting is Drafting.MODEL else None
    return ClusterConfig(
        models=(ModelConfig(name=_MODEL, target=target, draft=draft),),
        router=RouterConfig(http_port=port, grpc_port=free_port()),
        control=ControlConfig(store=f"sqlite:///{conditions.cache / 'paceline' / f'{port}.db'}"),
    )


def _pool(conditions: Conditions, model: Path, quantization: Quantization = Quantization.NONE) -> PoolConfig:
    return PoolConfig(
        path=str(model),
        quantization=quantization,
        max_model_len=conditions.max_model_len,
        block_size=_BLOCK_SIZE,
        kv_blocks=-(-conditions.max_streams * conditions.max_model_len // _BLOCK_SIZE),
        prefix_cache=False,
        max_num_seqs=max(conditions.max_streams, 2),
        num_threads=conditions.threads,
    )
