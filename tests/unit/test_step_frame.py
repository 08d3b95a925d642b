"""What rank 0 tells of a step is what the others read."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.runtime.input_batch import HostRows, InputBatch
from cluster.runtime.step_frame import FRAME_WORDS, FrameHeader, FrameKind, decode_step, encode_signal, encode_step
from tests.fakes import sampling

pytestmark = pytest.mark.unit

BLOCK_SIZE = 4


def rows(*sequences: ScheduledSequence) -> HostRows:
    return InputBatch.build(SchedulerOutput(sequences), BLOCK_SIZE).host


def sequence(num_tokens: int, start: int, num_samples: int) -> ScheduledSequence:
    table = tuple(range(7, 7 + -(-(start + num_tokens) // BLOCK_SIZE)))
    return ScheduledSequence("a", tuple(range(100, 100 + num_tokens)), start, table, num_samples, sampling())


STEPS = {
    "decode": rows(sequence(1, 9, 1)),
    "prefill, decode and verification": rows(sequence(30, 3, 0), sequence(1, 17, 1), sequence(5, 8, 5)),
    "more than fits one frame": rows(sequence(4000, 1, 1), sequence(1, 5000, 1)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_arrives_as_it_was_sent(name: str) -> None:
    sent = STEPS[name]
    words = encode_step(sent, number=2**31 + 5)
    assert words.dtype == np.int32
    assert len(words) >= FRAME_WORDS
    header = FrameHeader.parse(words)
    assert (header.kind, header.number) == (FrameKind.STEP, 5)
    received = decode_step(header, words, BLOCK_SIZE)
    for field in dataclasses.fields(HostRows):
        before, after = getattr(sent, field.name), getattr(received, field.name)
        assert before.dtype == after.dtype
        assert np.array_equal(before, after), field.name


def test_a_signal_has_no_rows() -> None:
    header = FrameHeader.parse(encode_signal(FrameKind.PING, 3))
    assert (header.kind, header.number, header.num_tokens) == (FrameKind.PING, 3, 0)


def test_words_that_are_no_frame_are_refused() -> None:
    words = encode_step(STEPS["decode"], 0)
    words[4] += 1
    with pytest.raises(ValueError, match="do not add up"):
        FrameHeader.parse(words)
    with pytest.raises(ValueError):
        FrameHeader.parse(np.zeros(FRAME_WORDS, dtype=np.int32))
