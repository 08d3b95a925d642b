"""Serves transformers' `generate` as streamed completions; runs in an environment that has transformers and no more.

Requests run one after the other. Greedy; a request's end of sequence is ignored; prompts are token ids.
"""

from __future__ import annotations

import argparse
import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer


class Generator:
    """Owns the model, its draft if it has one, and the turn of each request."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(options.model)
        self._model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
        self._assistance: dict[str, Any] = {}
        if options.drafting == "ngram":
            self._assistance = {"prompt_lookup_num_tokens": options.draft_tokens}
        elif options.drafting == "draft":
            draft = load_demo_draft(Path(options.draft), self._model)
            draft.generation_config.num_assistant_tokens = options.draft_tokens
            self._assistance = {"assistant_model": draft}
        self._turn = threading.Lock()

    def generate(self, token_ids: list[int], max_tokens: int, streamer: BaseStreamer) -> None:
        inputs = torch.tensor([token_ids])
        with self._turn, torch.inference_mode():
            self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                streamer=streamer,
                pad_token_id=0,
                **self._assistance,
            )


class WidenedHead(torch.nn.Module):
    """A head of fewer outputs, over the whole vocabulary: what it does not score is never chosen."""

    def __init__(self, weight: torch.Tensor, token_ids: torch.Tensor, vocab_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)  # [num_outputs, hidden_size]
        self.token_ids = token_ids
        self.vocab_size = vocab_size

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = torch.nn.functional.linear(hidden, self.weight)
        lowest = torch.finfo(scores.dtype).min
        wide = torch.full((*hidden.shape[:-1], self.vocab_size), lowest, dtype=scores.dtype)
        wide[..., self.token_ids] = scores
        return wide


def load_demo_draft(folder: Path, target: Any) -> Any:
    """The demo draft as transformers can run it: it shares the target's embedding and scores part of the vocabulary."""
    tensors = load_file(folder / "model.safetensors")
    token_ids, head = tensors.pop("draft_vocab").long(), tensors.pop("lm_head.weight")
    config = AutoConfig.from_pretrained(folder)
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    tensors["model.embed_tokens.weight"] = target.get_input_embeddings().weight
    draft.load_state_dict(tensors, strict=False, assign=True)
    draft.lm_head = WidenedHead(head, token_ids, config.vocab_size)
    return draft


class Handler(BaseHTTPRequestHandler):
    """Answers /health and /v1/completions."""

    def __init__(self, generator: Generator, *arguments: Any) -> None:
        self._generator = generator
        super().__init__(*arguments)

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        events = Events(self, self._generator.tokenizer)
        self._generator.generate(request["prompt"], request["max_tokens"], events)
        self.say({"choices": [], "usage": {"completion_tokens": events.num_tokens}})

    def say(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: a line per request is of no use."""


class Events(BaseStreamer):  # type: ignore[misc]  # transformers has no type information
    """Sends what `generate` puts out; its first output is the prompt."""

    def __init__(self, handler: Handler, tokenizer: Any) -> None:
        self._handler = handler
        self._tokenizer = tokenizer
        self._prompt_seen = False
        self.num_tokens = 0

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.num_tokens += value.numel()
        text = self._tokenizer.decode(value.flatten(), skip_special_tokens=True)
        self._handler.say({"choices": [{"text": text, "finish_reason": None}]})

    def end(self) -> None:
        """Nothing: the caller says how many tokens there were."""


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "draft", "drafting"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("draft-tokens", "threads", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    handler = partial(Handler, Generator(options))
    ThreadingHTTPServer(("127.0.0.1", options.port), handler).serve_forever()


if __name__ == "__main__":
    main()
