"""What dtypes and quantisation cost: perplexity of a fixed text, and how often the likeliest token is float32's.

    python -m load_tests.quality

Each variant computes the whole text as a server would, in chunks over a paged cache of the variant's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cluster.config import Device, DType, PoolConfig, Quantization
from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.messages.request import SamplingParams
from cluster.runtime.any_model import load_any_model
from cluster.runtime.input_batch import InputBatch
from cluster.runtime.kv_store import KVCache
from cluster.runtime.model import Model
from cluster.runtime.model_runner import DTYPES, torch_device, weight_dtype
from cluster.runtime.model_store import resolve_model
from cluster.tokenizer import Tokenizer

Variant = tuple[DType, Quantization]

MODEL = "smollm2-135m"
TEXT = Path(__file__).parent / "quality_text.txt"
VARIANTS: tuple[Variant, ...] = (
    (DType.FLOAT32, Quantization.NONE),
    (DType.BFLOAT16, Quantization.NONE),
    (DType.FLOAT16, Quantization.NONE),
    (DType.FLOAT32, Quantization.INT8),
    (DType.BFLOAT16, Quantization.INT8),
)
_BLOCK_SIZE, _CHUNK = 16, 256


@dataclass(frozen=True, slots=True)
class Quality:
    """One variant; `agreement` is the share of positions at which the likeliest token is the first variant's."""

    dtype: DType
    quantization: Quantization
    weight_bytes: int
    perplexity: float
    agreement: float
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class _Scores:
    """What a model says of a text."""

    perplexity: float
    likeliest: Tensor  # int64 [num_tokens - 1]


def measure(path: str, token_ids: Sequence[int], variants: Sequence[Variant] = VARIANTS) -> Iterator[Quality]:
    """Yield every variant of a model; the first one is what the others are compared with. Raises ModelError."""
    baseline: _Scores | None = None
    for dtype, quantization in variants:
        pool = PoolConfig(path=path, dtype=dtype, quantization=quantization, max_model_len=max(16, len(token_ids)))
        model, device = _load(pool), torch_device(Device.CPU)
        num_blocks = -(-len(token_ids) // _BLOCK_SIZE)
        scores = _score(model, KVCache.allocate(model.spec, num_blocks, _BLOCK_SIZE, DTYPES[dtype], device), token_ids)
        baseline = baseline or scores
        agreement = (scores.likeliest == baseline.likeliest).float().mean().item()
        yield Quality(dtype, quantization, model.weight_bytes, scores.perplexity, agreement, len(token_ids))


def _load(pool: PoolConfig) -> Model:
    device = torch_device(Device.CPU)
    return load_any_model(resolve_model(pool.path), weight_dtype(pool, device), device, None, pool.max_model_len)


@torch.inference_mode()
def _score(model: Model, kv: KVCache, token_ids: Sequence[int]) -> _Scores:
    table, sampling = tuple(range(kv.num_blocks)), SamplingParams(max_tokens=1, seed=0)
    loss, likeliest = 0.0, []
    for start in range(0, len(token_ids) - 1, _CHUNK):
        chunk = tuple(token_ids[start : min(start + _CHUNK, len(token_ids) - 1)])
        item = ScheduledSequence("text", chunk, start, table, len(chunk), sampling)
        logits = model.forward(InputBatch.build(SchedulerOutput((item,)), kv.block_size), kv)
        following = torch.tensor(token_ids[start + 1 : start + 1 + len(chunk)])
        loss += torch.nn.functional.cross_entropy(logits.double(), following, reduction="sum").item()
        likeliest.append(logits.argmax(dim=1))
    mean_loss = torch.tensor(loss / (len(token_ids) - 1), dtype=torch.float64)
    return _Scores(mean_loss.exp().item(), torch.cat(likeliest))


def text_token_ids(path: str) -> tuple[int, ...]:
    """The fixed text as a model reads it."""
    return tuple(Tokenizer.load(resolve_model(path)).encode(TEXT.read_text()))


def main(model: Annotated[str, typer.Option(help="as a pool's path")] = MODEL) -> None:
    """Print a table of all variants."""
    columns = ("dtype", "quantization", "MB of weights", "perplexity", "agrees with float32")
    table = Table(*columns, title=f"{model}, {len(token_ids := text_token_ids(model))} tokens")
    for row in measure(model, token_ids):
        figures = (f"{row.weight_bytes / 1e6:.1f}", f"{row.perplexity:.4f}", f"{row.agreement:.2%}")
        table.add_row(row.dtype.value, row.quantization.value, *figures)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
