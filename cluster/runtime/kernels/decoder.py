"""A decoder's step as one call: the other kernels one after the other, with no Python between them."""

from __future__ import annotations

import numpy as np

from cluster.runtime.kernels.attention_tile import ATTENTION
from cluster.runtime.kernels.compiling import Record, Records, native
from cluster.runtime.kernels.elementwise import launch_gated_silu, launch_rms_norm
from cluster.runtime.kernels.formats import BYTES_MASK, FLOAT32
from cluster.runtime.kernels.gather import gather_rows
from cluster.runtime.kernels.kv_write import KV_WRITE, launch_kv_write
from cluster.runtime.kernels.linear import launch_linear
from cluster.runtime.kernels.paged_attention import launch_attention
from cluster.runtime.kernels.rotary import launch_rotary

# One layer's addresses. Scales, biases and qk_norm may be 0; matrices are [out_features, in_features], norms float32.
LAYER = np.dtype(
    [
        (name, np.int64)
        for name in (
            "input_norm", "qkv", "qkv_scales", "qkv_bias", "qk_norm", "output", "output_scales", "output_bias",
            "mlp_norm", "gate_up", "gate_up_scales", "gate_up_bias", "down", "down_scales", "down_bias",
            "keys", "values",
        )
    ]
)  # fmt: skip

# One step on one model: everything that the layers share, and what comes before and after them.
STEP = np.dtype(
    [
        (name, np.int64)
        for name in (
            "embedding", "embedding_scales", "embedding_stored",  # [vocab, hidden_size]; scales may be 0
            "rotary_table",  # float32 [positions, head_dim]
            "final_norm",
            "head", "head_scales", "head_bias", "head_stored", "output_size",  # [output_size, hidden_size]
            "token_ids", "positions", "sample_rows",  # int64 [num_tokens], [num_tokens], [num_samples]
            "slots", "block_table", "query_start", "context_len",  # as the kernels below take them
            "num_tokens", "num_samples", "num_seqs", "table_stride",
            "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
            "weights_stored", "kv_stored", "block_size",  # Formats
            "hidden", "table_rows", "normed", "packed", "attended", "middle", "gate_up", "activated",  # scratch
            "linear_function", "norm_function", "silu_function", "rotary_function", "kv_write_function",
            "tile_function", "span_function", "merge_function", "num_threads",
            "logits",  # float32 [num_samples, output_size], out
        )
    ]
    + [("eps", np.float64)]
)  # fmt: skip


@native
def _linear(
    team: int, s: Record, x: int, weight: int, scales: int, bias: int, residual: int, out: int, columns: int, depth: int
) -> None:
    launch_linear(
        team, s.linear_function, x, weight, scales, bias, residual, out,
        s.num_tokens, columns, depth, 4 * depth, s.weights_stored,
    )  # fmt: skip


@native
def _norm(team: int, s: Record, x: int, weight: int, out: int, num_rows: int, weight_rows: int, features: int) -> None:
    launch_rms_norm(team, s.norm_function, x, weight, out, num_rows, weight_rows, features, s.eps)


@native
def _prepare_heads(team: int, s: Record, qk_norm: int) -> None:
    """Norm and rotate queries and keys where they lie, in front of each token's values."""
    rotated = s.num_heads + s.num_kv_heads
    token_stride = (rotated + s.num_kv_heads) * s.head_dim * 4
    if qk_norm:
        for token in range(s.num_tokens):
            heads = s.packed + token * token_stride
            _norm(team, s, heads, qk_norm, heads, rotated, rotated, s.head_dim)
    launch_rotary(
        team, s.rotary_function, s.packed, s.table_rows, token_stride, s.num_tokens, rotated, s.head_dim
    )  # fmt: skip


@native
def _write(team: int, s: Record, layer_keys: int, layer_values: int) -> None:
    args = np.empty(1, KV_WRITE)
    a = args[0]
    features = s.num_kv_heads * s.head_dim
    a.keys = s.packed + s.num_heads * s.head_dim * 4
    a.values = a.keys + features * 4
    a.key_stride = a.value_stride = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim * 4
    a.layer_keys, a.layer_values, a.slots = layer_keys, layer_values, s.slots
    a.num_tokens, a.num_features, a.stored = s.num_tokens, features, s.kv_stored
    a.function = s.kv_write_function
    launch_kv_write(team, args)


@native
def _attend(team: int, s: Record, layer_keys: int, layer_values: int) -> None:
    args = np.empty(1, ATTENTION)
    a = args[0]
    a.query, a.keys, a.values, a.out = s.packed, layer_keys, layer_values, s.attended
    a.block_table, a.query_start, a.context_len = s.block_table, s.query_start, s.context_len
    a.query_stride = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim * 4
    a.token_stride, a.table_stride = s.num_kv_heads * s.head_dim * (s.kv_stored & BYTES_MASK), s.table_stride
    a.num_seqs, a.num_heads, a.num_kv_heads = s.num_seqs, s.num_heads, s.num_kv_heads
    a.head_dim, a.block_size, a.stored = s.head_dim, s.block_size, s.kv_stored
    a.tile_function, a.span_function, a.merge_function = s.tile_function, s.span_function, s.merge_function
    a.num_threads = s.num_threads
    a.window, a.scale, a.softcap = 0, 1 / np.sqrt(s.head_dim), 0
    launch_attention(team, args)


@native
def _layer(team: int, layer: Record, s: Record) -> None:
    hidden, heads = s.hidden_size, s.num_heads * s.head_dim
    packed = heads + 2 * s.num_kv_heads * s.head_dim
    _norm(team, s, s.hidden, layer.input_norm, s.normed, s.num_tokens, 1, hidden)
    _linear(team, s, s.normed, layer.qkv, layer.qkv_scales, layer.qkv_bias, 0, s.packed, packed, hidden)
    _prepare_heads(team, s, layer.qk_norm)
    _write(team, s, layer.keys, layer.values)
    _attend(team, s, layer.keys, layer.values)
    _linear(
        team, s, s.attended, layer.output, layer.output_scales, layer.output_bias, s.hidden, s.middle, hidden, heads
    )
    _norm(team, s, s.middle, layer.mlp_norm, s.normed, s.num_tokens, 1, hidden)
    _linear(
        team, s, s.normed, layer.gate_up, layer.gate_up_scales, layer.gate_up_bias, 0, s.gate_up,
        2 * s.intermediate_size, hidden,
    )  # fmt: skip
    launch_gated_silu(team, s.silu_function, s.gate_up, s.activated, s.num_tokens, s.intermediate_size)
    _linear(
        team, s, s.activated, layer.down, layer.down_scales, layer.down_bias, s.middle, s.hidden,
        hidden, s.intermediate_size,
    )  # fmt: skip


@native
def _enter(s: Record) -> None:
    """Each token's embedding, and its row of the rotary table."""
    gather_rows(s.embedding, s.embedding_scales, s.token_ids, s.hidden, s.num_tokens, s.hidden_size, s.embedding_stored)
    gather_rows(s.rotary_table, 0, s.positions, s.table_rows, s.num_tokens, s.head_dim, FLOAT32)


@native
def _leave(team: int, s: Record) -> None:
    """Logits of the rows that are sampled."""
    gather_rows(s.hidden, 0, s.sample_rows, s.middle, s.num_samples, s.hidden_size, FLOAT32)
    _norm(team, s, s.middle, s.final_norm, s.normed, s.num_samples, 1, s.hidden_size)
    launch_linear(
        team, s.linear_function, s.normed, s.head, s.head_scales, s.head_bias, 0, s.logits,
        s.num_samples, s.output_size, s.hidden_size, 4 * s.hidden_size, s.head_stored,
    )  # fmt: skip


@native
def run_decoder(team: int, layers: Records, step: Records) -> None:
    """Run a STEP record on LAYER records in order; every address must stay valid until the call returns."""
    s = step[0]
    _enter(s)
    for index in range(len(layers)):
        _layer(team, layers[index], s)
    if s.num_samples:
        _leave(team, s)
