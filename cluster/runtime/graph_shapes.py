"""Which steps run as CUDA graphs: those that fit into one of a few shapes, padded up to it. Pure.

    rows        | sequence 0 | sequence 1 | ... | one row for each sequence that is missing | rows of no sequence |
                0                                                                        num_tokens

A shape counts rows, not who has them: sequences with different numbers of guesses share one. A sequence that is
missing has one row and one key all the same: for one without keys, FlashAttention 2 writes outside of its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from cluster.messages.request import MAX_DRAFT_TOKENS

MAX_QUERY_LEN = MAX_DRAFT_TOKENS + 1  # rows of a sequence; one that has more reads its prompt
_ROWS_PER_SEQ = (1, 2, 3, 4, 6, 9, 17, MAX_QUERY_LEN)  # draft lengths 0, 1, 2, 3, 5, 8, 16 and 32


class Eager(StrEnum):
    """Why a step runs without a graph."""

    NO_SAMPLES = "nobody waits for its end, before which the next step's inputs must not take the place of its own"
    PREFILL = "a sequence reads its prompt"
    LONG_TABLE = "a block table is longer than any that was foreseen"
    TOO_LARGE = "it has more sequences or rows than any shape"
    NOT_CAPTURED = "the shape's capture failed"


@dataclass(frozen=True, slots=True)
class GraphShape:
    """Sizes that a graph is captured for."""

    num_seqs: int
    rows_per_seq: int  # on average; 1: exactly

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.rows_per_seq

    @property
    def max_query_len(self) -> int:
        return 1 if self.rows_per_seq == 1 else MAX_QUERY_LEN


@dataclass(frozen=True, slots=True)
class GraphShapes:
    """All shapes of a pool, in the order in which a step looks for its own: few rows first."""

    shapes: tuple[GraphShape, ...]
    table_width: int  # blocks of the longest sequence

    @classmethod
    def of(cls, max_num_seqs: int, max_num_tokens: int, max_model_len: int, block_size: int) -> GraphShapes:
        """Shapes for steps of up to max_num_seqs sequences; none has more than max_num_tokens rows."""
        shapes = [
            GraphShape(num_seqs, rows)
            for num_seqs in _sizes(max_num_seqs)
            for rows in _ROWS_PER_SEQ
            if num_seqs * rows <= max_num_tokens and rows <= max_model_len
        ]
        shapes.sort(key=lambda shape: (shape.num_tokens, shape.num_seqs))
        return cls(tuple(shapes), -(-max_model_len // block_size))

    @property
    def capture_order(self) -> tuple[GraphShape, ...]:
        """Largest first: the smaller ones then find room in the memory that the larger ones needed."""
        return self.shapes[::-1]

    def fit(self, num_seqs: int, num_tokens: int, max_query_len: int, table_width: int) -> GraphShape | Eager:
        """The shape with the fewest rows that a step, which has some, can be padded to."""
        if max_query_len > MAX_QUERY_LEN:
            return Eager.PREFILL
        if table_width > self.table_width:
            return Eager.LONG_TABLE
        fitting = (
            shape
            for shape in self.shapes
            if num_seqs <= shape.num_seqs and num_tokens + shape.num_seqs - num_seqs <= shape.num_tokens
        )
        return next(fitting, Eager.TOO_LARGE)


def _sizes(most: int) -> Iterator[int]:
    """1, 2, 4, ... and `most` itself."""
    size = 1
    while size < most:
        yield size
        size *= 2
    if most > 0:
        yield most
