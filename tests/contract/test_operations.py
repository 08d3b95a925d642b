"""The sizes in docs/operations.md against the block arithmetic, the sharding and the example configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.config import PoolConfig, load_config
from cluster.core.draft_length import DraftLengthConfig, DraftLengthController, DraftLengthState
from cluster.runtime.kv_store import bytes_per_block, num_blocks_for
from cluster.runtime.model_spec import ModelSpec
from cluster.runtime.sharding import Shard
from tests.contract.test_docs import DOCS, ROOT, read

pytestmark = pytest.mark.contract

PAGE = read(DOCS / "operations.md")
(EXAMPLE,) = load_config(ROOT / "k8s" / "configs" / "prod.yaml").models
VOCABULARY = {"vocab_size": 128256, "max_position_embeddings": 131072}
SHAPES = {
    "target": VOCABULARY
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    | {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False},
    "draft": VOCABULARY
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
}
GPU_BYTES = 79 * 2**30
NUM_RANKS = EXAMPLE.target.tensor_parallel
BYTES = 2  # of a number in bfloat16
BANDWIDTH = {"H100": 2.68e12, "L40S": 0.69e12}
FLOPS = 600e12
NUM_SEQUENCES, LENGTH, ACCEPTANCE, OVERHEAD_S = 64, 3000, 0.75, 0.001


def spec_of(name: str) -> ModelSpec:
    return ModelSpec.from_pretrained_config({"model_type": "llama"} | SHAPES[name])


@cache
def num_parameters(name: str) -> int:
    """As transformers counts them, without memory for them."""
    with torch.device("meta"):
        network = LlamaForCausalLM(LlamaConfig(**SHAPES[name]))
    return sum(parameter.numel() for parameter in network.parameters())


def kv_blocks(pool: PoolConfig, block_bytes: int) -> int:
    most = pool.max_num_seqs * ceil(pool.max_model_len / pool.block_size)
    return num_blocks_for(pool.kv_memory_fraction, block_bytes, GPU_BYTES, most)


def table_rows(header: str) -> list[list[str]]:
    """The cells of the table whose first line begins so."""
    table = PAGE[PAGE.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_memory_of_the_example_is_what_the_code_allocates() -> None:
    target, draft = EXAMPLE.target, EXAMPLE.draft
    assert draft is not None
    specs = [spec_of("target"), Shard.of(spec_of("target"), 0, NUM_RANKS).spec_of(spec_of("target")), spec_of("draft")]
    parameters = [num_parameters("target"), num_parameters("target") / NUM_RANKS, num_parameters("draft")]
    blocks = [bytes_per_block(spec, target.block_size, torch.bfloat16) for spec in specs]
    numbers = [kv_blocks(target, blocks[1]), kv_blocks(draft, blocks[2])]
    used = [parameters[1 + i] * BYTES + numbers[i] * blocks[1 + i] for i in range(2)]
    expected = [
        ["layers, KV heads, head_dim", *(f"{len(one.kv_heads)}, {one.num_kv_heads}, {one.head_dim}" for one in specs)],
        ["parameters", *(f"{number:,.0f}" for number in parameters)],
        ["weights, GB", *(f"{number * BYTES / 1e9:.1f}" for number in parameters)],
        ["KV of a token, bytes", *(f"{block // target.block_size:,}" for block in blocks)],
        ["KV of a block, bytes", *(f"{block:,}" for block in blocks)],
        ["`kv_memory_fraction`", "", *(f"{pool.kv_memory_fraction}" for pool in (target, draft))],
        ["KV blocks", "", *(f"{number:,}" for number in numbers)],
        ["tokens in them", "", *(f"{number * target.block_size:,}" for number in numbers)],
        ["GB in use", "", *(f"{number / 1e9:.1f}" for number in used)],
    ]
    assert table_rows("| | target | a rank of four | draft |") == expected
    assert max(used) < 0.9 * GPU_BYTES
    tokens = numbers[0] * target.block_size
    average = tokens // target.max_num_seqs
    assert f"{target.max_num_seqs} sequences (`max_num_seqs`) of {average:,} tokens on average" in PAGE
    assert f"or {tokens // target.max_model_len} of the longest" in PAGE
    assert numbers[1] * draft.block_size == draft.max_num_seqs * draft.max_model_len


def step_s(num_rows: int) -> float:
    """A target's step with so many rows per sequence."""
    parameters = num_parameters("target") / NUM_RANKS
    kv = bytes_per_block(Shard.of(spec_of("target"), 0, NUM_RANKS).spec_of(spec_of("target")), 1, torch.bfloat16)
    read_s = (parameters * BYTES + NUM_SEQUENCES * LENGTH * kv) / BANDWIDTH["H100"]
    return max(read_s, NUM_SEQUENCES * num_rows * 2 * parameters / FLOPS)


def draft_s(num_sessions: int, bandwidth: float) -> float:
    kv = bytes_per_block(spec_of("draft"), 1, torch.bfloat16)
    return (num_parameters("draft") * BYTES + num_sessions * LENGTH * kv) / bandwidth


def expected_tokens(num_draft_tokens: int) -> float:
    """E(K) by the controller's own sum, for a request that has shown this acceptance for long."""
    controller = DraftLengthController(DraftLengthConfig())
    state = DraftLengthState(max_draft_tokens=32)
    state.acceptance.accepted, state.acceptance.rejected = ACCEPTANCE * 1e9, (1 - ACCEPTANCE) * 1e9
    return controller.expected_tokens(state, num_draft_tokens)


def gain_with(draft: float, steps: list[float]) -> Callable[[int], float]:
    """By the number of guesses; steps[r - 1] is a step with r rows per sequence."""

    def gain(k: int) -> float:
        return expected_tokens(k) * steps[0] / (k * draft + OVERHEAD_S + steps[k]) if k else 1.0

    return gain


def test_draft_replicas_for_a_target_follow_from_the_cost_ratio() -> None:
    steps = [step_s(num_rows) for num_rows in range(1, 10)]
    assert f"A plain step takes {steps[0] * 1e3:.1f} ms" in PAGE
    rows = table_rows("| drafts on |")
    for card, sessions, *cells in rows:
        num_sessions = int(sessions)
        draft = draft_s(num_sessions, BANDWIDTH[card])
        gain = gain_with(draft, steps)
        best, replicas = max(range(9), key=gain), NUM_SEQUENCES // num_sessions
        per_gpu = gain(best) * NUM_RANKS / (NUM_RANKS + replicas)
        numbers = [f"{draft * 1e3:.1f}", f"{draft / steps[0]:.2f}", f"{best}", f"{gain(best):.2f}"]
        assert cells == [*numbers, f"{replicas}", f"{per_gpu:.2f}"], (card, sessions)
    assert len(rows) == 5


def test_the_example_configuration_has_the_sizes_that_the_guide_comes_to() -> None:
    target, draft = EXAMPLE.target, EXAMPLE.draft
    assert draft is not None
    assert target.autoscaling is not None
    assert draft.autoscaling is not None
    per_target = NUM_SEQUENCES // draft.max_num_seqs
    assert target.max_num_seqs == NUM_SEQUENCES
    assert draft.autoscaling.min_replicas == target.autoscaling.min_replicas * per_target
    assert draft.autoscaling.max_replicas == target.autoscaling.max_replicas * per_target
