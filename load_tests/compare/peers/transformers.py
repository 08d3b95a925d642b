"""transformers' own `generate` behind the smallest HTTP server that streams: one request at a time."""

from __future__ import annotations

from pathlib import Path

from load_tests.compare.environment import Environment
from load_tests.compare.peers.base import AbsentError, Arm, Conditions, Say, ServerCommand, Weights
from load_tests.compare.workload import Ask

REQUIREMENTS = ("torch==2.13.0", "transformers==5.24.0")
_SERVER = Path(__file__).with_name("transformers_server.py")


class Transformers:
    """Its defaults: SDPA attention, dynamic cache; assisted by prompt lookup, or by the demo draft."""

    def prepare(self, conditions: Conditions, say: Say) -> None:
        _environment(conditions).ensure(say)

    def server_of(self, arm: Arm) -> Arm:
        return arm

    def command(self, arm: Arm, conditions: Conditions, port: int) -> ServerCommand:
        if arm.weights is not Weights.BFLOAT16:
            raise AbsentError("it is compared in bf16 only")
        options = {
            "--model": str(conditions.model),
            "--draft": str(conditions.draft),
            "--drafting": str(arm.drafting),
            "--draft-tokens": str(conditions.max_draft_tokens),
            "--threads": str(conditions.threads),
            "--port": str(port),
        }
        words = [word for option in options.items() for word in option]
        variables = {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(conditions.threads)}
        # -P: this folder has a module of transformers' name.
        argv = (str(_environment(conditions).python), "-P", str(_SERVER), *words)
        return ServerCommand(argv, variables, "/health")

    def body(self, arm: Arm, ask: Ask) -> dict[str, object]:
        return {"prompt": list(ask.prompt_token_ids), "max_tokens": ask.max_tokens}


def _environment(conditions: Conditions) -> Environment:
    return Environment(conditions.cache / "transformers", REQUIREMENTS)
