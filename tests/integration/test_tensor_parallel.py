"""Engines whose model is a group of processes: the same tokens, speculation or not, and lost ranks are noticed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import Device, DType, PoolConfig
from cluster.core.step import SchedulerOutput, StepOutput
from cluster.messages.rounds import Refusal, RefusalReason, Submit
from cluster.runtime.engine import Engine
from cluster.runtime.engine_loop import EngineError
from cluster.runtime.factory import draft_engine, target_engine
from cluster.runtime.leader import TensorParallelRunner, build_tensor_parallel_runner
from cluster.runtime.model_runner import ModelRunner, build_runner
from cluster.runtime.model_spec import ModelError
from cluster.runtime.rank_processes import RankProcesses
from cluster.runtime.ranks import RankJob
from cluster.runtime.work import ShouldStop, never
from tests.engines import TinyRouter
from tests.fakes import sampling, save_tiny_pair
from tests.integration.test_engine_models import DRAFT_LEN, ROUNDS, pool, pool_config, requests
from tests.integration.test_model_runner import GREEDY, decode, piece, run

pytestmark = pytest.mark.integration

TIMEOUT_S = 20.0  # in a collective: more than this machine ever keeps a process from running
WEDGED_S = 3.0
UNEVEN: dict[str, Any] = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROMPT = [5, 17, 80, 2, 44]


class Launch:
    """Starts ranks as processes and remembers them."""

    processes: RankProcesses

    def __call__(self, jobs: list[RankJob]) -> RankProcesses:
        self.processes = RankProcesses(jobs)
        return self.processes


def divided(config: PoolConfig, size: int, launch: Launch | None = None, **options: Any) -> TensorParallelRunner:
    config = config.model_copy(update={"tensor_parallel": size})
    options = {"device": Device.CPU, "target_path": None, "timeout_s": TIMEOUT_S} | options
    return build_tensor_parallel_runner(config, launch=launch or Launch(), **options)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_pair(tmp_path_factory.mktemp("models"), **UNEVEN)


@pytest.fixture(scope="module", params=[2, 3])
def runner(request: pytest.FixtureRequest, models: Path) -> Iterator[TensorParallelRunner]:
    built = divided(pool_config(models / "target"), request.param)
    yield built
    built.leader.close()


def test_a_group_decodes_what_one_device_does(models: Path, runner: TensorParallelRunner) -> None:
    assert decode(runner, PROMPT, 20) == decode(build_runner(pool_config(models / "target"), Device.CPU), PROMPT, 20)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param(Device.CPU, DType.FLOAT32, id="gloo"),
        pytest.param(Device.CUDA, DType.FLOAT32, id="NCCL", marks=GPU),
        pytest.param(Device.CUDA, DType.BFLOAT16, id="NCCL in 16 bits", marks=GPU),
    ],
)
def test_a_group_of_one_decodes_what_no_group_does(models: Path, device: Device, dtype: DType) -> None:
    config = pool_config(models / "target").model_copy(
        update={"dtype": dtype, "block_size": None, "cuda_graphs": False}
    )
    group = divided(config, 1, device=device)
    try:
        assert decode(group, PROMPT, 20) == decode(build_runner(config, device), PROMPT, 20)
    finally:
        group.leader.close()


def test_a_rows_logprobs_are_the_same_to_the_bit_whatever_else_is_in_the_batch(runner: TensorParallelRunner) -> None:
    asked = sampling(8, temperature=0.0, num_logprobs=3)
    alone = run(runner, piece(PROMPT, 0, 5, asked))
    other = piece([1, 2, 3, 4, 5, 6, 7], 0, 2, GREEDY, "b")
    crowded = runner.execute(SchedulerOutput((moved(other, 45), piece(PROMPT, 0, 5, asked))))
    assert crowded.samples["a"].logprobs == alone.samples["a"].logprobs is not None


def moved(item: Any, first_block: int) -> Any:
    return type(item)(**{**fields(item), "block_table": tuple(range(first_block, 60))})


def fields(item: Any) -> dict[str, Any]:
    return {name: getattr(item, name) for name in type(item).__slots__}


def test_a_step_that_takes_more_than_a_frame(runner: TensorParallelRunner) -> None:
    crowd = [moved(piece([3, 4], 0, 1, name=f"s{index}"), 9) for index in range(60)]
    outputs = runner.execute(SchedulerOutput(tuple(crowd)))
    assert len({sample.token_ids for sample in outputs.samples.values()}) == 1


def test_ranks_hold_about_equal_parts_of_the_weights(models: Path, runner: TensorParallelRunner) -> None:
    whole = sum(runner.weight_bytes)
    assert max(runner.weight_bytes) < 1.25 * whole / len(runner.weight_bytes)  # three KV heads on two ranks are uneven


@pytest.mark.parametrize("draft_size", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_changes_no_token(
    models: Path, runner: TensorParallelRunner, temperature: float, draft_size: int
) -> None:
    config = pool_config(models / "draft")
    drafting = draft_runner(config, draft_size, str(models / "target"))
    target_config = pool_config(models / "target")
    plain = pool(target_engine(runner, target_config, ROUNDS))
    plain.engine.handle(requests(temperature, max_draft_tokens=0))
    plain.run()
    target, draft = pool(target_engine(runner, target_config, ROUNDS)), pool(draft_engine(drafting, config))
    router = TinyRouter(target, draft)
    for request in requests(temperature, DRAFT_LEN):
        router.submit(request)
    router.run(advance=lambda: None)
    router.close()
    if isinstance(drafting, TensorParallelRunner):
        drafting.leader.close()
    assert [target.output(f"r{index}") for index in range(4)] == [plain.output(f"r{index}") for index in range(4)]
    assert target.engine.faults.total == draft.engine.faults.total == 0


def draft_runner(config: PoolConfig, size: int, target: str) -> ModelRunner:
    return build_runner(config, Device.CPU, target) if size == 1 else divided(config, size, target_path=target)


def test_a_model_that_cannot_be_divided_is_refused_before_a_rank_starts(models: Path) -> None:
    def launch(jobs: list[RankJob]) -> RankProcesses:
        raise AssertionError("a rank was started")

    with pytest.raises(ModelError, match="the model has 9 attention heads, which 10 ranks cannot share"):
        divided(pool_config(models / "target"), 10, launch)  # type: ignore[arg-type]


def test_the_command_refuses_it_before_anything_starts(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "paceline.yaml"
    file.write_text(f"models: [{{name: m, target: {{path: {models / 'target'}, tensor_parallel: 10}}}}]")
    result = CliRunner().invoke(app, ["generate", "hello", "--no-cluster", "--config", str(file)])
    assert result.exit_code == 1
    assert "tensor_parallel: the model has 9 attention heads, which 10 ranks cannot share" in result.output


# --- lost ranks -------------------------------------------------------------------------------------------------------


class Busy:
    """A started engine on two ranks, and what became of it."""

    def __init__(self, models: Path, timeout_s: float) -> None:
        launch = Launch()
        config = pool_config(models / "target")
        runner = divided(config, 2, launch, timeout_s=timeout_s)
        self.processes = launch.processes
        self.stepped = threading.Event()
        self.events: list[Any] = []
        self.engine: Engine = target_engine(_Watched(runner, self.stepped), config, ROUNDS)  # type: ignore[arg-type]
        runner.leader.on_lost, self.engine.on_closed = self.engine.abandon, runner.leader.close
        self.engine.on_events = self.events.extend
        self.engine.start()

    def submit(self) -> None:
        self.engine.handle([Submit("r", (3, 4, 5), sampling(100, temperature=0.0, ignore_eos=True))])
        assert self.stepped.wait(30)

    def is_unhealthy(self) -> bool:
        try:
            self.engine.check_health()
        except EngineError:
            return True
        return False


class _Watched:
    """A runner that tells when it has run a step, and takes its time between steps."""

    def __init__(self, runner: TensorParallelRunner, stepped: threading.Event) -> None:
        self._runner = runner
        self._stepped = stepped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, step: SchedulerOutput, should_stop: ShouldStop = never) -> StepOutput:
        output = self._runner.execute(step, should_stop)
        self._stepped.set()
        return output


def wait_until(condition: Callable[[], bool], timeout_s: float) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s
        time.sleep(0.01)
    return time.monotonic() - began


@pytest.mark.parametrize("is_busy", [True, False], ids=["in a step", "idle"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "wedged"])
def test_a_lost_rank_ends_the_engine_and_the_group(models: Path, how: signal.Signals, is_busy: bool) -> None:
    busy = Busy(models, timeout_s=TIMEOUT_S if how is signal.SIGKILL else WEDGED_S)
    if is_busy:
        busy.submit()
    os.kill(busy.processes.pids[0], how)
    wait_until(busy.is_unhealthy, 15)
    busy.engine.stop()  # returns: its thread hangs nowhere
    assert busy.processes.failure() is not None
    if is_busy:
        refusals = [event for event in busy.events if isinstance(event, Refusal)]
        assert [(refusal.request_id, refusal.reason) for refusal in refusals] == [("r", RefusalReason.DRAINING)]


def test_ranks_end_with_their_engine(models: Path) -> None:
    busy = Busy(models, TIMEOUT_S)
    busy.submit()
    busy.engine.stop()
    assert busy.processes.failure() is not None
    assert not busy.is_unhealthy()
