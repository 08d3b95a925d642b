"""Engines with real models, from configuration to tokens: speculation on equals speculation off, in float32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from cluster.config import Device, DType, PoolConfig, Quantization, SpeculationConfig
from cluster.messages.request import DraftLengthMode, HoldMode
from cluster.messages.rounds import Commit, Submit
from cluster.runtime.drafter import DraftEngine
from cluster.runtime.engine import Engine
from cluster.runtime.factory import load_draft_engine, load_engine
from cluster.runtime.model_spec import ModelError
from tests.engines import Pool, TinyRouter
from tests.fakes import TINY_VOCAB, sampling, save_tiny_pair

pytestmark = pytest.mark.integration

DRAFT_LEN = 4
ROUNDS = SpeculationConfig(
    max_draft_tokens=DRAFT_LEN, draft_length=DraftLengthMode.FIXED, hold=HoldMode.DEADLINE, max_hold_ms=10_000
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a small draft that reads the target's embedding, and nothing that agrees with the target by design."""
    return save_tiny_pair(tmp_path_factory.mktemp("models"))


def pool_config(path: Path) -> PoolConfig:
    return PoolConfig(
        path=str(path), dtype=DType.FLOAT32, kv_blocks=64, block_size=4, max_num_batched_tokens=32, max_model_len=128
    )


SMALLER: dict[str, dict[str, Any]] = {
    "int8": {"quantization": Quantization.INT8},
    "int8 beside a bfloat16 cache": {"quantization": Quantization.INT8, "dtype": DType.BFLOAT16},
    "float16": {"dtype": DType.FLOAT16},
}


@pytest.mark.parametrize("name", SMALLER)
def test_speculation_changes_no_token_of_smaller_weights(models: Path, name: str) -> None:
    config = pool_config(models / "target").model_copy(update=SMALLER[name])
    drafting = pool_config(models / "draft").model_copy(update=SMALLER[name])
    plain = pool(load_engine(config, ROUNDS, Device.CPU))
    plain.engine.handle(requests(1.0, max_draft_tokens=0))
    plain.run()
    target = pool(load_engine(config, ROUNDS, Device.CPU))
    draft = pool(load_draft_engine(drafting, str(models / "target"), Device.CPU))
    router = TinyRouter(target, draft)
    for request in requests(1.0, DRAFT_LEN):
        router.submit(request)
    router.run(advance=lambda: None)
    assert [target.output(f"r{index}") for index in range(4)] == [plain.output(f"r{index}") for index in range(4)]
    assert target.engine.faults.total == draft.engine.faults.total == 0


def target_engine(models: Path) -> Engine:
    return load_engine(pool_config(models / "target"), ROUNDS, Device.CPU)


def draft_engine(models: Path, name: str) -> DraftEngine:
    return load_draft_engine(pool_config(models / name), str(models / "target"), Device.CPU)


@pytest.mark.parametrize(
    ("limits", "max_model_len", "warns"),
    [
        ({"max_model_len": 128}, 128, False),
        ({"max_model_len": 8192}, 256, False),  # the model's own
        ({"max_model_len": 8192, "kv_blocks": 10}, 40, True),
    ],
)
def test_the_longest_sequence_is_what_configuration_model_and_kv_blocks_all_allow(
    models: Path, limits: dict[str, int], max_model_len: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = pool_config(models / "target").model_copy(update=limits)
    engine = load_engine(config, ROUNDS, Device.CPU)
    assert engine.max_model_len == max_model_len
    assert [record.levelname for record in caplog.records if "KV blocks limit" in record.message] == ["WARNING"] * warns
    target = pool(engine)
    everything = Submit("r", (5, 17, 80), sampling(max_model_len - 3, ignore_eos=True))
    engine.handle([everything])
    target.run()
    assert len(target.output("r")) == max_model_len - 3


def pool(engine: Engine | DraftEngine) -> Pool:
    built = Pool(engine, runner=None, kv=None)  # type: ignore[arg-type]
    engine.on_events = built.events.extend
    return built


def requests(temperature: float, max_draft_tokens: int, **fields: Any) -> list[Submit]:
    chance = random.Random(5)
    return [
        Submit(
            f"r{index}",
            tuple(chance.randrange(3, TINY_VOCAB) for _ in range(chance.randint(1, 30))),
            sampling(
                **{
                    "max_tokens": 21,
                    "seed": index,
                    "temperature": temperature,
                    "top_p": 0.9,
                    "ignore_eos": True,
                    **fields,
                }
            ),
            max_draft_tokens,
        )
        for index in range(4)
    ]


def plain_outputs(models: Path, temperature: float, **fields: Any) -> list[tuple[int, ...]]:
    target = pool(target_engine(models))
    target.engine.handle(requests(temperature, max_draft_tokens=0, **fields))
    target.run()
    return [target.output(f"r{index}") for index in range(4)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_name", ["target", "draft"])
def test_speculation_changes_no_token(models: Path, draft_name: str, temperature: float) -> None:
    target, draft = pool(target_engine(models)), pool(draft_engine(models, draft_name))
    router = TinyRouter(target, draft)
    for request in requests(temperature, DRAFT_LEN):
        router.submit(request)
    router.run(advance=lambda: None)
    router.close()
    assert [target.output(f"r{index}") for index in range(4)] == plain_outputs(models, temperature)
    assert target.engine.stats().num_used_blocks == draft.engine.stats().num_used_blocks == 0
    assert target.engine.faults.total == draft.engine.faults.total == 0
    if draft_name == "target":
        lengths = {request_id: [] for request_id in ("r0", "r1", "r2", "r3")}  # type: dict[str, list[int]]
        for commit in target.of(Commit):
            lengths[commit.request_id].append(len(commit.token_ids))
        assert set(map(tuple, lengths.values())) == {(1, 5, 5, 5, 5)}


def test_a_missing_model_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        load_engine(pool_config(tmp_path / "nowhere"), ROUNDS, Device.CPU)


BIAS = tuple((token_id, -100.0) for token_id in range(0, TINY_VOCAB, 2))
PARAMETERS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.0},
    "repetition": {"repetition_penalty": 1.5},
    "bias": {"logit_bias": BIAS},
    "min_tokens": {"min_tokens": 13, "ignore_eos": False, "logit_bias": ((1, 60.0),)},  # token 1 is end of sequence
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_speculation_changes_no_token_under_parameters_that_change_logits(models: Path, name: str) -> None:
    plain = plain_outputs(models, 1.0, **PARAMETERS[name])
    assert plain != plain_outputs(models, 1.0)
    if name == "bias":
        assert all(token_id % 2 for output in plain for token_id in output)
    if name == "min_tokens":
        assert {len(output) for output in plain} == {14}
    for draft_name in ("target", "draft"):
        target, draft = pool(target_engine(models)), pool(draft_engine(models, draft_name))
        router = TinyRouter(target, draft)
        for request in requests(1.0, DRAFT_LEN, **PARAMETERS[name]):
            router.submit(request)
        router.run(advance=lambda: None)
        router.close()
        assert [target.output(f"r{index}") for index in range(4)] == plain
        rejected = [c for c in target.of(Commit) if c.num_accepted_tokens < c.num_draft_tokens and not c.finish_reason]
        assert bool(rejected) == (draft_name == "draft")
