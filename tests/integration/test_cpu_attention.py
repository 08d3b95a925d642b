"""Paged attention on the CPU: agrees with the reference, and a row's bits depend on its own context only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from cluster.core.step import ScheduledSequence, SchedulerOutput
from cluster.messages.request import SamplingParams
from cluster.runtime.attention import PLAIN, AttentionOptions
from cluster.runtime.attention.cpu import CpuAttention
from cluster.runtime.attention.reference import ReferenceAttention
from cluster.runtime.input_batch import InputBatch
from cluster.runtime.threads import kernel_team, set_num_threads

pytestmark = pytest.mark.integration

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [(9, 3, 64), (4, 2, 16), (4, 1, 8), (6, 6, 80), (8, 2, 128), (3, 1, 100)]  # num_heads, num_kv_heads, head_dim
RAGGED = ((0, 1), (5, 3), (300, 1), (250, 20), (0, 37), (700, 5))  # start and number of rows of each sequence


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's random keys and values, and the blocks of each sequence, shuffled."""

    keys: Tensor
    values: Tensor
    tables: tuple[tuple[int, ...], ...]

    def batch(self, rows: Sequence[tuple[int, int, int]]) -> InputBatch:
        """rows: (sequence, start, number of rows)."""
        sampling = SamplingParams(max_tokens=1, seed=0)
        items = (
            ScheduledSequence(f"r{index}", (1,) * count, start, self.tables[sequence], 0, sampling)
            for index, (sequence, start, count) in enumerate(rows)
        )
        return InputBatch.build(SchedulerOutput(tuple(items)), self.keys.shape[1])


def make_cache(
    lengths: Sequence[int], heads: tuple[int, int, int], block_size: int = 16, dtype: torch.dtype = torch.float32
) -> Cache:
    generator = torch.Generator().manual_seed(3)
    counts = [-(-length // block_size) for length in lengths]
    blocks = torch.randperm(sum(counts), generator=generator).split(counts)
    shape = (sum(counts), block_size, *heads[1:])
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return Cache(keys, values, tuple(tuple(table.tolist()) for table in blocks))


def ragged_cache(heads: tuple[int, int, int], block_size: int = 16, dtype: torch.dtype = torch.float32) -> Cache:
    return make_cache([start + count for start, count in RAGGED], heads, block_size, dtype)


def ragged_batch(cache: Cache) -> InputBatch:
    return cache.batch([(index, start, count) for index, (start, count) in enumerate(RAGGED)])


def queries(num_rows: int, heads: tuple[int, int, int]) -> Tensor:
    return torch.randn((num_rows, heads[0], heads[2]), generator=torch.Generator().manual_seed(4))


def attend(cache: Cache, query: Tensor, batch: InputBatch, options: AttentionOptions = PLAIN) -> Tensor:
    return CpuAttention().attend(query, cache.keys, cache.values, batch, options)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    threads, torch_threads = kernel_team().num_threads, torch.get_num_threads()
    yield
    set_num_threads(threads)
    torch.set_num_threads(torch_threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 13, 16])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_ragged_batch_agrees_with_the_reference(
    heads: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> None:
    cache = ragged_cache(heads, block_size, dtype)
    batch = ragged_batch(cache)
    query = queries(batch.num_tokens, heads)
    expected = ReferenceAttention().attend(query, cache.keys, cache.values, batch)
    torch.testing.assert_close(attend(cache, query, batch), expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    cache = ragged_cache(heads, dtype=dtype)
    batch = ragged_batch(cache)
    query = queries(batch.num_tokens, heads)
    together = attend(cache, query, batch)
    for index, (start, count) in enumerate(RAGGED):
        for row in {0, count // 2, count - 1}:
            place = int(batch.query_start[index]) + row
            alone = attend(cache, query[place : place + 1], cache.batch([(index, start + row, 1)]))
            assert torch.equal(alone[0], together[place])


OPTIONS = {
    "a window of one key": AttentionOptions(window=1),
    "a window within a span": AttentionOptions(window=100),
    "a window over spans": AttentionOptions(window=300),
    "a window longer than anything": AttentionOptions(window=5000),
    "another scale": AttentionOptions(scale=0.03),
    "soft-capped scores": AttentionOptions(softcap=1.5),
    "everything": AttentionOptions(scale=0.4, window=257, softcap=5.0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_windows_scales_and_caps_agree_with_the_reference(name: str, dtype: torch.dtype) -> None:
    heads = (4, 2, 24)
    cache = ragged_cache(heads, dtype=dtype)
    batch, options = ragged_batch(cache), OPTIONS[name]
    query = queries(batch.num_tokens, heads)
    expected = ReferenceAttention().attend(query, cache.keys, cache.values, batch, options)
    torch.testing.assert_close(attend(cache, query, batch, options), expected, rtol=1e-5, atol=5e-6)
    if "longer" not in name:
        assert not torch.allclose(expected, ReferenceAttention().attend(query, cache.keys, cache.values, batch))


@pytest.mark.parametrize("name", OPTIONS)
def test_windows_scales_and_caps_keep_a_rows_bits_its_own(name: str) -> None:
    heads, options = (6, 2, 16), OPTIONS[name]
    cache, query = make_cache([700, 40], heads), queries(740, heads)
    whole = attend(cache, query, cache.batch([(0, 0, 700), (1, 0, 40)]), options)
    for start, count in ((0, 1), (5, 30), (255, 3), (400, 1), (690, 6), (699, 1)):
        part = attend(cache, query[start : start + count], cache.batch([(0, start, count)]), options)
        assert torch.equal(part, whole[start : start + count])


@pytest.mark.usefixtures("restored_threads")
def test_windowed_spans_as_tasks_have_the_same_bits() -> None:
    heads, options = (9, 3, 64), AttentionOptions(window=700, softcap=10.0)
    cache = make_cache([3000], heads)
    batch, results = cache.batch([(0, 2990, 6)]), []
    query = queries(batch.num_tokens, heads)
    for num_threads in (1, 7):
        set_num_threads(num_threads)
        results.append(attend(cache, query, batch, options))
    assert torch.equal(results[0], results[1])
    expected = ReferenceAttention().attend(query, cache.keys, cache.values, batch, options)
    torch.testing.assert_close(results[0], expected, rtol=1e-5, atol=5e-6)


def test_keys_before_a_window_are_not_even_read_once_they_fill_a_span() -> None:
    heads, options = (2, 1, 16), AttentionOptions(window=20)
    cache, query = make_cache([600], heads), queries(1, heads)
    batch = cache.batch([(0, 599, 1)])
    before = attend(cache, query, batch, options)
    cache.keys[list(cache.tables[0][:16])] = torch.nan
    cache.values[list(cache.tables[0][:16])] = torch.nan
    assert torch.equal(attend(cache, query, batch, options), before)


@pytest.mark.parametrize("chunks", [[600], [1] * 5 + [595], [255, 1, 1, 343], [256, 256, 88], [17] * 35 + [5]])
def test_a_prompt_has_the_same_bits_however_it_is_cut_into_chunks(chunks: list[int]) -> None:
    heads = (9, 3, 64)
    cache, query = make_cache([600], heads), queries(600, heads)
    ends = [sum(chunks[: index + 1]) for index in range(len(chunks))]
    parts = [
        attend(cache, query[end - count : end], cache.batch([(0, end - count, count)]))
        for end, count in zip(ends, chunks, strict=True)
    ]
    assert torch.equal(torch.cat(parts), attend(cache, query, cache.batch([(0, 0, 600)])))


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("rows", [[(0, 2999, 1)], [(0, 2990, 6)], [(0, 1000, 64), (1, 0, 100)]], ids=str)
def test_bits_do_not_depend_on_threads_nor_on_spans_as_tasks(rows: list[tuple[int, int, int]]) -> None:
    heads = (9, 3, 64)
    cache = make_cache([3000, 100], heads)
    batch = cache.batch(rows)
    query, results = queries(batch.num_tokens, heads), []
    for num_threads in (1, 2, 7):  # more threads make spans into tasks
        set_num_threads(num_threads)
        results.append(attend(cache, query, batch))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_what_lies_past_a_rows_context_does_not_reach_it() -> None:
    heads = (9, 3, 64)
    cache, query = make_cache([40], heads), queries(3, heads)
    before = attend(cache, query, cache.batch([(0, 30, 3)]))
    later_blocks, last_block = list(cache.tables[0][3:]), cache.tables[0][2]
    cache.keys[last_block, 1:] = torch.nan  # positions 33 ..
    cache.values[last_block, 1:] = torch.nan
    cache.keys[later_blocks] = torch.nan
    assert torch.equal(attend(cache, query, cache.batch([(0, 30, 3)])), before)


def test_large_scores_do_not_overflow() -> None:
    heads = (2, 1, 16)
    cache, query = make_cache([50], heads), queries(1, heads) * 1e4
    batch = cache.batch([(0, 49, 1)])
    expected = ReferenceAttention().attend(query, cache.keys, cache.values, batch)
    torch.testing.assert_close(attend(cache, query, batch), expected)


def test_a_step_without_rows_gives_no_output() -> None:
    cache = make_cache([16], (2, 1, 16))
    assert attend(cache, queries(0, (2, 1, 16)), cache.batch([])).shape == (0, 2, 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_keys_and_values_land_in_their_slots_as_torch_would_round_them(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    cache = ragged_cache(heads, dtype=dtype)
    batch = ragged_batch(cache)
    packed = torch.randn(batch.num_tokens, heads[0] + 2 * heads[1], heads[2])
    keys, values = packed[:, heads[0] : heads[0] + heads[1]], packed[:, heads[0] + heads[1] :]
    expected_keys, expected_values = cache.keys.clone(), cache.values.clone()
    ReferenceAttention().write_kv(keys, values, expected_keys, expected_values, batch)
    CpuAttention().write_kv(keys, values, cache.keys, cache.values, batch)
    assert torch.equal(cache.keys, expected_keys)
    assert torch.equal(cache.values, expected_values)


def test_queries_may_be_a_view_of_packed_projections() -> None:
    heads = (9, 3, 64)
    cache = ragged_cache(heads)
    batch = ragged_batch(cache)
    packed = torch.randn(batch.num_tokens, 15, 64)
    assert torch.equal(attend(cache, packed[:, :9], batch), attend(cache, packed[:, :9].contiguous(), batch))


def test_layouts_that_the_kernel_does_not_read_are_refused() -> None:
    cache = make_cache([16], (2, 1, 16))
    batch = cache.batch([(0, 0, 1)])
    with pytest.raises(ValueError, match="adjacent heads"):
        attend(cache, queries(1, (2, 1, 16)).double(), batch)
    with pytest.raises(ValueError, match="contiguous cache of floats"):
        CpuAttention().attend(queries(1, (2, 1, 16)), cache.keys.double(), cache.values.double(), batch)
