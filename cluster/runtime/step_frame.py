"""What rank 0 tells the other ranks before each step: 32-bit integers in a fixed layout.

    header      kind | number | length | num_seqs | num_tokens | num_samples | table_width | 0
    body        query_start [num_seqs + 1] | context_len [num_seqs] | block_table [num_seqs * table_width]
                | token_ids [num_tokens] | sample_rows [num_samples]

`length` counts header and body. The first FRAME_WORDS words always travel, so that a step of few rows is one message;
a longer one sends the rest in a second message. `number` counts frames: a rank that misses one must not go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from cluster.runtime.input_batch import HostRows

Words = NDArray[np.int32]

HEADER_WORDS = 8
FRAME_WORDS = 2048  # 8 KiB
_MAX_NUMBER = 2**31


class FrameKind(IntEnum):
    STEP = 1
    PING = 2  # answer that you are there
    STOP = 3


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The first words of a frame."""

    kind: FrameKind
    number: int
    length: int
    num_seqs: int
    num_tokens: int
    num_samples: int
    table_width: int

    @classmethod
    def parse(cls, words: Words) -> FrameHeader:
        """Raises ValueError for words that no rank 0 sends."""
        kind, *rest, _ = words[:HEADER_WORDS].tolist()
        header = cls(FrameKind(kind), *rest)
        if header.length != _length(header.num_seqs, header.num_tokens, header.num_samples, header.table_width):
            raise ValueError(f"a frame's sizes do not add up: {header}")
        return header


def encode_signal(kind: FrameKind, number: int) -> Words:
    """A frame without rows, FRAME_WORDS long."""
    words = np.zeros(FRAME_WORDS, dtype=np.int32)
    words[:4] = kind, number % _MAX_NUMBER, _length(0, 0, 0, 0), 0
    return words


def encode_step(rows: HostRows, number: int) -> Words:
    """A step's frame, at least FRAME_WORDS long."""
    num_seqs, table_width = rows.block_table.shape
    sizes = (num_seqs, len(rows.token_ids), len(rows.sample_rows), table_width)
    length = _length(*sizes)
    words = np.zeros(max(FRAME_WORDS, length), dtype=np.int32)
    words[:HEADER_WORDS] = (FrameKind.STEP, number % _MAX_NUMBER, length, *sizes, 0)
    body = (rows.query_start, rows.context_len, rows.block_table.reshape(-1), rows.token_ids, rows.sample_rows)
    np.concatenate(body, out=words[HEADER_WORDS:length], casting="same_kind")
    return words


def decode_step(header: FrameHeader, words: Words, block_size: int) -> HostRows:
    """The rows of a whole frame."""
    sizes = (header.num_seqs + 1, header.num_seqs, header.num_seqs * header.table_width, header.num_tokens)
    body = words[HEADER_WORDS : header.length]
    query_start, context_len, table, token_ids, sample_rows = np.split(body, np.cumsum(sizes))
    return HostRows.locate(
        token_ids.astype(np.int64),
        sample_rows.astype(np.int64),
        query_start,
        context_len,
        table.reshape(header.num_seqs, header.table_width),
        block_size,
    )


def _length(num_seqs: int, num_tokens: int, num_samples: int, table_width: int) -> int:
    return HEADER_WORDS + 2 * num_seqs + 1 + num_seqs * table_width + num_tokens + num_samples
