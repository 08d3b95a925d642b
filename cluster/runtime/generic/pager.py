"""What stands behind transformers' attention interface while a network runs one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from cluster.runtime.attention import AttentionBackend, AttentionOptions
from cluster.runtime.input_batch import InputBatch
from cluster.runtime.kv_store import KVCache
from cluster.runtime.model_spec import KVHeads

IMPLEMENTATION = "paceline"  # our name in transformers' table of attention functions


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One call of the attention function, the same in every step."""

    kv: KVHeads
    options: AttentionOptions


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """What transformers hands to the attention function; keyword arguments in `extra`."""

    query: Tensor  # [1, num_heads, num_rows, head_dim]
    key: Tensor  # [1, num_kv_heads, num_rows, head_dim]
    value: Tensor  # like key
    mask: Tensor | None
    extra: Mapping[str, Any]

    def rows(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the first `count` rows as [count, heads, head_dim], contiguous."""
        query, key, value = (_heads_together(part[0], count) for part in (self.query, self.key, self.value))
        return query, key, value

    def answer(self, attended: Tensor) -> tuple[Tensor, None]:
        """As transformers wants it, [1, num_rows, num_heads, head_dim]; rows past those attended are zero."""
        missing = self.query.shape[2] - len(attended)
        return F.pad(attended, (0, 0, 0, 0, 0, missing))[None], None


def _heads_together(heads: Tensor, count: int) -> Tensor:
    """[heads, num_rows, head_dim] -> [count, heads, head_dim]; the views give a single head the usual stride too."""
    num_heads, _, head_dim = heads.shape
    return heads.transpose(0, 1)[:count].reshape(count, num_heads * head_dim).view(count, num_heads, head_dim)


class Attending(Protocol):
    """Answers a network's attention calls."""

    def attend(self, call: AttentionCall) -> tuple[Tensor, None]: ...


def connect(network: nn.Module, attending: Attending) -> None:
    """Have every attention call of the network answered by `attending`."""
    for module in network.modules():
        module.attending = attending  # type: ignore[assignment]


def _attention_function(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **extra: Any
) -> tuple[Tensor, None]:
    attending: Attending = module.attending
    return attending.attend(AttentionCall(query, key, value, attention_mask, extra))


def register() -> None:
    """Make our name known to transformers. Idempotent."""
    AttentionInterface.register(IMPLEMENTATION, _attention_function)


class Pager:
    """Owns the step under way: its rows, and which layer attends next, in the order that the probe saw."""

    def __init__(self, layers: Sequence[AttentionLayer], backend: AttentionBackend) -> None:
        self._layers = layers
        self._backend = backend
        self._step: tuple[InputBatch, KVCache] | None = None
        self._next = 0

    def begin(self, batch: InputBatch, kv: KVCache) -> None:
        """What the next attention calls are about."""
        self._step, self._next = (batch, kv), 0

    def attend(self, call: AttentionCall) -> tuple[Tensor, None]:
        """See Attending. The step's keys and values are written first."""
        if self._step is None:
            raise RuntimeError("attention was called outside of a step")
        batch, kv = self._step
        index, self._next = self._next, self._next + 1
        layer_keys, layer_values = kv.keys[index], kv.values[index]
        query, key, value = call.rows(batch.num_tokens)
        self._backend.write_kv(key, value, layer_keys, layer_values, batch)
        options = self._layers[index].options
        return call.answer(self._backend.attend(query, layer_keys, layer_values, batch, options))
