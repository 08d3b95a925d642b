"""transformers' own generate in a process of its own: reads prompts as JSON lines, answers with timings.

python -m load_tests.transformers_peer MODEL_DIR DTYPE NUM_THREADS
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class Clock(BaseStreamer):  # type: ignore[misc]  # transformers has no type information
    """Notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""


def tpot_s(model: Any, token_ids: Sequence[int], max_tokens: int) -> float:
    """Mean time per output token after the first, in seconds."""
    clock = Clock()
    inputs = torch.tensor([list(token_ids)])
    model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        streamer=clock,
        pad_token_id=0,
    )
    times = clock.times[1:]  # the streamer is given the prompt first
    return (times[-1] - times[0]) / (len(times) - 1)


def main() -> None:
    folder, dtype, num_threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(num_threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval()
    for line in sys.stdin:
        job = json.loads(line)
        with torch.inference_mode():
            result = tpot_s(model, job["token_ids"], job["max_tokens"])
        sys.stdout.write(json.dumps({"tpot_s": result}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
