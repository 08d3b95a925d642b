"""Learns how a network attends by running it once, and refuses it if the paged cache is not all of its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from cluster.runtime.attention import AttentionOptions
from cluster.runtime.attention.reference import attend_one
from cluster.runtime.generic.pager import AttentionCall, AttentionLayer
from cluster.runtime.model_spec import KVHeads, ModelError

NUM_TOKENS = 12  # of a probe
_KNOWN = frozenset({"scaling", "sliding_window", "softcap"})
_HARMLESS = frozenset(  # arguments that say nothing about one row's attention to its own sequence
    {"cache_position", "dropout", "is_causal", "layer_idx", "output_attentions", "output_router_logits", "position_ids"}
)


class Recorder:
    """Answers attention calls of one sequence by the reference, and notes what each layer asks for."""

    def __init__(self, num_rows: int) -> None:
        self.layers: list[AttentionLayer] = []
        self._num_rows = num_rows

    def attend(self, call: AttentionCall) -> tuple[Tensor, None]:
        """See pager.Attending. Raises ModelError for attention that the kernels do not compute."""
        layer = _layer_of(call)
        self.layers.append(layer)
        return call.answer(attend_one(*call.rows(self._num_rows), layer.options))


def _layer_of(call: AttentionCall) -> AttentionLayer:
    if call.mask is not None:
        raise ModelError("it adds a mask or a bias of its own to its attention scores")
    head_dims = {tensor.shape[3] for tensor in (call.query, call.key, call.value)}
    if len(head_dims) > 1:
        raise ModelError(f"its keys and values have heads of different sizes ({sorted(head_dims)})")
    unknown = [name for name, value in call.extra.items() if name not in _KNOWN | _HARMLESS and _is_set(value)]
    if unknown:
        raise ModelError(f"its attention needs {unknown[0]}, which the paged attention does not compute")
    if call.extra.get("is_causal") is False:
        raise ModelError("its attention is not causal")
    options = AttentionOptions(call.extra.get("scaling"), call.extra.get("sliding_window"), call.extra.get("softcap"))
    return AttentionLayer(KVHeads(call.key.shape[1], call.key.shape[3]), options)


def _is_set(value: object) -> bool:
    return value is not None and value is not False


def check_layers(layers: Sequence[AttentionLayer], num_layers: int, layer_types: Sequence[str] | None) -> None:
    """Raise ModelError unless every layer attends, through the interface and with the window that its type promises."""
    if not layers:
        raise ModelError("it does not compute attention through transformers' attention interface")
    if len(layers) != num_layers:
        raise ModelError(f"{len(layers)} attention calls in {num_layers} layers: layers with other state are not paged")
    for index, kind in enumerate(layer_types or ()):
        if kind == "sliding_attention" and layers[index].options.window is None:
            raise ModelError(f"layer {index} has a sliding window but does not name it to its attention")


def check_equal(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Raise ModelError if two runs over the same tokens differ by more than `tolerance`, relative."""
    error = float((actual - expected).norm() / expected.norm())
    if not error <= tolerance:  # also if it is NaN
        raise ModelError(f"{what} (relative difference {error:.2g})")


def probe_tokens(vocab_size: int) -> Tensor:
    """Token ids that have nothing to do with each other, int64 [NUM_TOKENS]."""
    return torch.randint(vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))


def in_pieces(run: Callable[[list[int], int], Tensor], tokens: list[int]) -> Tensor:
    """Logits of all tokens; run(tokens, start) computes some of them, given the keys and values of those before."""
    cuts = (0, 5, 6, len(tokens))
    return torch.cat([run(tokens[start:end], start) for start, end in pairwise(cuts)])
