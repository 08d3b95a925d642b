"""Engines on transformers' networks: speculation on equals speculation off, token for token, in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cluster.config import Device, DType, PoolConfig, SpeculationConfig
from cluster.core.ngram import NgramIndex
from cluster.messages.request import DraftLengthMode, HoldMode
from cluster.messages.rounds import Commit, DraftBlock, Submit
from cluster.runtime.factory import load_draft_engine, load_engine
from tests.engines import Pool, TinyRouter
from tests.fakes import TINY_VOCAB, sampling
from tests.tiny_networks import save_network

pytestmark = pytest.mark.integration

DRAFT_LEN = 4
ROUNDS = SpeculationConfig(
    max_draft_tokens=DRAFT_LEN, draft_length=DraftLengthMode.FIXED, hold=HoldMode.DEADLINE, max_hold_ms=10_000
)
FAMILIES = ("gpt2", "gemma2", "gemma3", "qwen2_moe")


def pool_config(path: Path) -> PoolConfig:
    return PoolConfig(
        path=str(path), dtype=DType.FLOAT32, kv_blocks=64, block_size=4, max_num_batched_tokens=32, max_model_len=128
    )


def target_pool(path: Path) -> Pool:
    return pool(load_engine(pool_config(path), ROUNDS, Device.CPU))


def pool(engine: object) -> Pool:
    built = Pool(engine, runner=None, kv=None)  # type: ignore[arg-type]
    built.engine.on_events = built.events.extend
    return built


def requests(temperature: float, max_draft_tokens: int) -> list[Submit]:
    chance = random.Random(5)
    prompts = [tuple(chance.choices(range(3, TINY_VOCAB), k=chance.randint(3, 12))) * 2 for _ in range(4)]
    params = [sampling(21, index, temperature=temperature, top_p=0.9, ignore_eos=True) for index in range(4)]
    return [Submit(f"r{i}", prompt, params[i], max_draft_tokens) for i, prompt in enumerate(prompts)]


def outputs(target: Pool) -> list[tuple[int, ...]]:
    return [target.output(f"r{index}") for index in range(4)]


def plain_outputs(path: Path, temperature: float) -> list[tuple[int, ...]]:
    """Each request alone, so that speculation is compared with other batches too."""
    target = target_pool(path)
    for request in requests(temperature, max_draft_tokens=0):
        target.engine.handle([request])
        target.run()
    return outputs(target)


def run_ngram(target: Pool, submits: list[Submit]) -> None:
    """Propose what followed before, wherever the target asks for guesses."""
    indices = {submit.request_id: NgramIndex(submit.prompt_token_ids, 1, 4) for submit in submits}
    target.engine.handle(submits)
    seen = 0
    while target.engine.step() is not None:
        commits = target.of(Commit)[seen:]
        seen += len(commits)
        for commit in commits:
            indices[commit.request_id].extend(commit.token_ids)
            guess = indices[commit.request_id].guess(commit.next_draft_len)
            length = commit.base_len + len(commit.token_ids)
            target.engine.handle([DraftBlock(commit.request_id, length, guess)])


@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_changes_no_token(family: str, tmp_path: Path) -> None:
    save_network(tmp_path / "target", family)
    save_network(tmp_path / "draft", family, seed=1)
    for temperature in (0.0, 1.0):
        plain = plain_outputs(tmp_path / "target", temperature)
        assert all(len(output) == 21 for output in plain)
        for draft_name in ("target", "draft"):
            target = target_pool(tmp_path / "target")
            path = str(tmp_path / "target")
            draft = pool(load_draft_engine(pool_config(tmp_path / draft_name), path, Device.CPU))
            router = TinyRouter(target, draft)
            for request in requests(temperature, DRAFT_LEN):
                router.submit(request)
            router.run(advance=lambda: None)
            assert outputs(target) == plain
            accepted = [commit.num_accepted_tokens for commit in target.of(Commit) if commit.num_draft_tokens]
            assert (min(accepted) == DRAFT_LEN) == (draft_name == "target")
            assert target.engine.faults.total == draft.engine.faults.total == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_ngram_guesses_change_no_token(family: str, tmp_path: Path) -> None:
    save_network(tmp_path, family)
    target = target_pool(tmp_path)
    run_ngram(target, requests(1.0, DRAFT_LEN))
    assert outputs(target) == plain_outputs(tmp_path, 1.0)
    assert sum(commit.num_draft_tokens for commit in target.of(Commit)) > 0
