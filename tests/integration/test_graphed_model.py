"""Steps replayed from graphs give the tokens of steps that run as they are; on the CPU with graphs that are none."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from cluster.config import DType, PoolConfig
from cluster.core.step import ScheduledSequence, SchedulerOutput, StepOutput
from cluster.messages.request import SamplingParams
from cluster.runtime.attention import AttentionOptions
from cluster.runtime.attention.cuda import CudaAttention
from cluster.runtime.attention.dense import attend_dense
from cluster.runtime.attention.reference import ReferenceAttention
from cluster.runtime.factory import draft_engine, target_engine
from cluster.runtime.graph_shapes import Eager, GraphShape, GraphShapes
from cluster.runtime.graphed_model import Capture, GraphedModel, Run, eager_reason, graphed
from cluster.runtime.input_batch import CPU
from cluster.runtime.kv_store import KVCache
from cluster.runtime.layers import TorchLayerOps
from cluster.runtime.model import Backend, DecoderModel, load_model
from cluster.runtime.model_runner import DTYPES, ModelRunner
from cluster.runtime.sampler import make_sampler
from cluster.runtime.static_batch import StaticBatches
from tests.engines import TinyRouter
from tests.fakes import save_tiny_pair
from tests.integration.test_cpu_attention import make_cache, queries
from tests.integration.test_engine_models import DRAFT_LEN, ROUNDS, pool, requests

pytestmark = pytest.mark.integration

CUDA = torch.device("cuda")
NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GREEDY = SamplingParams(max_tokens=8, seed=0, temperature=0.0)
DEVICES = [pytest.param(CPU, id="cpu"), pytest.param(CUDA, id="cuda", marks=NEEDS_CUDA)]


@dataclass
class FakeCapture:
    """Graphs that repeat what they were captured from, operation by operation."""

    runs: list[Run] = field(default_factory=list)
    replays: list[int] = field(default_factory=list)

    def __call__(self, run: Run) -> Run:
        number = len(self.runs)
        self.runs.append(run)

        def replay() -> None:
            self.replays.append(number)
            run()

        return replay


def capture_for(device: torch.device) -> Capture:
    if device.type == "cpu":
        return FakeCapture()
    from cluster.runtime.cuda_capture import CudaCapture

    return CudaCapture()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_pair(tmp_path_factory.mktemp("models"))


def config(path: Path, dtype: DType = DType.FLOAT32) -> PoolConfig:
    return PoolConfig(path=str(path), dtype=dtype, max_model_len=128, max_num_seqs=6, max_num_batched_tokens=64)


def load(models: Path, name: str, device: torch.device, dtype: DType = DType.FLOAT32) -> DecoderModel:
    """As CUDA computes it, on either device."""
    backend = Backend(TorchLayerOps(), CudaAttention())
    return load_model(models / name, DTYPES[dtype], device, models / "target", 128, backend)


def runners(
    models: Path, name: str, device: torch.device, capture: Capture, dtype: DType = DType.FLOAT32
) -> tuple[ModelRunner, ModelRunner, GraphedModel]:
    """One without graphs, and one with."""
    model, block_size = load(models, name, device, dtype), 16 if dtype is DType.FLOAT32 else 256
    caches = [KVCache.allocate(model.spec, 32, block_size, DTYPES[dtype], device, padded) for padded in (False, True)]
    graphs = graphed(config(models / name, dtype), model, caches[1])
    graphs.capture(capture)
    sampler = make_sampler(device)
    return ModelRunner(model, caches[0], sampler), ModelRunner(graphs, caches[1], sampler), graphs


def piece(
    tokens: list[int],
    start: int,
    samples: int,
    asked: SamplingParams = GREEDY,
    name: str = "a",
    blocks: tuple[int, ...] = (0,),
) -> ScheduledSequence:
    return ScheduledSequence(name, tuple(tokens[start:]), start, blocks, samples, asked)


def run(runner: ModelRunner, *pieces: ScheduledSequence) -> StepOutput:
    return runner.execute(SchedulerOutput(pieces))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_name", ["target", "draft"])
def test_speculation_over_graphs_changes_no_token(
    models: Path, device: torch.device, draft_name: str, temperature: float
) -> None:
    eager, replayed, graphs = runners(models, "target", device, capture_for(device))
    _, drafting, draft_graphs = runners(models, draft_name, device, capture_for(device))
    plain = pool(target_engine(eager, config(models / "target"), ROUNDS))
    plain.engine.handle(requests(temperature, max_draft_tokens=0))
    plain.run()
    target = pool(target_engine(replayed, config(models / "target"), ROUNDS))
    draft = pool(draft_engine(drafting, config(models / draft_name)))
    router = TinyRouter(target, draft)
    for request in requests(temperature, DRAFT_LEN):
        router.submit(request)
    router.run(advance=lambda: None)
    assert [target.output(f"r{index}") for index in range(4)] == [plain.output(f"r{index}") for index in range(4)]
    assert target.engine.faults.total == draft.engine.faults.total == 0
    for counts in (graphs.counts, draft_graphs.counts):
        assert sum(count for shape, count in counts.items() if isinstance(shape, GraphShape)) > counts[Eager.TOO_LARGE]
        assert not counts[Eager.NOT_CAPTURED]
    assert any(shape.rows_per_seq > 1 for shape in graphs.counts if isinstance(shape, GraphShape))


@pytest.mark.parametrize("device", DEVICES)
def test_plain_decoding_over_graphs_changes_no_token(models: Path, device: torch.device) -> None:
    outputs = []
    for runner in runners(models, "target", device, capture_for(device))[:2]:
        plain = pool(target_engine(runner, config(models / "target"), ROUNDS))
        plain.engine.handle(requests(1.0, max_draft_tokens=0))
        plain.run()
        outputs.append([plain.output(f"r{index}") for index in range(4)])
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_16_bit_logits_over_graphs_are_about_those_without(models: Path, dtype: DType) -> None:
    eager, replayed, graphs = runners(models, "target", CUDA, capture_for(CUDA), dtype)
    asked = SamplingParams(max_tokens=1, seed=0, temperature=0.0, num_logprobs=5)
    prompt = [5, 17, 80, 2, 44, 9, 31]
    steps = [piece(prompt, 0, 1, asked), piece([*prompt, 8], 7, 1, asked), piece([*prompt, 8, 3, 4], 8, 2, asked)]
    for step in steps:
        ours, theirs = (top_logprobs(run(each, step)) for each in (replayed, eager))
        assert all(ours[token] == pytest.approx(theirs[token], abs=0.1) for token in ours.keys() & theirs.keys())
        assert len(ours.keys() & theirs.keys()) >= 3
    assert graphs.counts.total() == len(steps)
    assert not graphs.counts.keys() & set(Eager)


def top_logprobs(output: StepOutput) -> dict[int, float]:
    sampled = output.samples["a"].logprobs
    assert sampled is not None
    return dict(sampled[0].top)


# --- what is captured, and when it is replayed ------------------------------------------------------------------------


def test_each_shape_is_captured_once_from_the_largest_and_a_step_replays_its_own(models: Path) -> None:
    capture = FakeCapture()
    _, runner, _ = runners(models, "target", CPU, capture)
    order = GraphShapes.of(6, 64, 128, 16).capture_order
    assert len(capture.runs) == len(order)
    assert capture.replays == list(range(len(order)))  # the check of each, once
    capture.replays.clear()
    run(runner, piece([1, 2], 0, 1))
    run(runner, piece([1, 2, 3], 2, 1))
    run(runner, piece([1, 2, 3, 4, 5, 6, 7, 8], 3, 5))
    assert [order[number] for number in capture.replays] == [GraphShape(1, 2), GraphShape(1, 1), GraphShape(1, 6)]


def test_a_prompts_chunk_runs_without_a_graph_and_so_does_what_runs_beside_it(models: Path) -> None:
    capture = FakeCapture()
    _, runner, graphs = runners(models, "target", CPU, capture)
    capture.replays.clear()
    prompt = piece(list(range(3, 50)), 0, 1, blocks=(0, 1, 2))
    run(runner, prompt)
    run(runner, prompt, piece([1], 0, 1, name="b", blocks=(5,)))
    assert not capture.replays
    assert graphs.counts == {Eager.PREFILL: 2}


def test_a_step_that_nobody_waits_for_runs_without_a_graph(models: Path) -> None:
    """The inputs of the step after it would be written over its own, which the device may not have read yet."""
    capture = FakeCapture()
    _, runner, graphs = runners(models, "target", CPU, capture)
    capture.replays.clear()
    run(runner, piece([1, 2, 3], 0, 0))
    assert not capture.replays
    assert graphs.counts == {Eager.NO_SAMPLES: 1}


def test_shapes_that_cannot_be_captured_run_eagerly_and_say_so_once(
    models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeCapture()

    def capture(run: Run) -> Run:
        if len(fake.runs) < 3:
            fake.runs.append(run)
            raise RuntimeError("operation not permitted when stream is capturing")
        return fake(run)

    eager, runner, graphs = runners(models, "target", CPU, capture)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    total = len(GraphShapes.of(6, 64, 128, 16).shapes)
    assert warnings == [
        f"3 of {total} shapes have no CUDA graph, the first because: operation not permitted when stream is capturing"
    ]
    many = [piece(list(range(1, 10)), 0, 1, name=f"s{index}", blocks=(index,)) for index in range(6)]
    assert run(runner, *many).samples == run(eager, *many).samples
    assert graphs.counts == {Eager.NOT_CAPTURED: 1}


def frozen(run: Run) -> Run:
    """A graph that does nothing when it is replayed: its logits stay those of its capture."""
    return lambda: None


def test_a_graph_that_repeats_another_steps_logits_is_not_used(models: Path) -> None:
    eager, runner, graphs = runners(models, "target", CPU, frozen)
    step = piece([1, 2, 3], 0, 3)
    assert run(runner, step).samples == run(eager, step).samples
    assert graphs.counts == {Eager.NOT_CAPTURED: 1}


def test_padding_leaves_the_blocks_of_sequences_as_they_are(models: Path) -> None:
    model = load(models, "target", CPU)
    kv = KVCache.allocate(model.spec, 8, 16, torch.float32, CPU, has_padding_block=True)
    before = torch.randn_like(kv.keys[0])
    for keys in kv.keys:
        keys.copy_(before)
    graphs = graphed(config(models / "target"), model, kv)
    graphs.capture(FakeCapture())
    run(ModelRunner(graphs, kv, make_sampler(CPU)), piece([4, 5, 6], 0, 1, blocks=(3,)))
    changed = [(keys != before).flatten(1).any(dim=1).nonzero().flatten().tolist() for keys in kv.keys]
    assert changed == [[3, kv.padding_block]] * len(kv.keys)


def test_what_others_left_in_a_block_does_not_reach_a_padded_step(models: Path) -> None:
    eager, runner, _ = runners(models, "target", CPU, FakeCapture())
    for keys, values in runner._kv.layers:
        keys.fill_(torch.nan)
        values.fill_(torch.nan)
    step = piece([4, 5, 6], 0, 1, blocks=(1,)), piece([7], 0, 1, name="b", blocks=(2,))
    assert run(runner, *step) == run(eager, *step)


def test_only_a_decoder_on_one_cuda_device_has_graphs(models: Path) -> None:
    model = load(models, "target", CPU)
    assert eager_reason(config(models / "target"), model) == "only CUDA has graphs"
    model.device = CUDA
    assert eager_reason(config(models / "target"), model) is None
    for fields, reason in (
        ({"cuda_graphs": False}, "cuda_graphs is off"),
        ({"tensor_parallel": 2}, "a sum over ranks has no timeout"),
    ):
        assert (eager_reason(config(models / "target").model_copy(update=fields), model) or "").startswith(reason)


def test_float32_has_shapes_for_as_many_sequences_as_attention_can_gather(models: Path) -> None:
    model = load(models, "target", CPU)
    kv = KVCache.allocate(model.spec, 8, 16, torch.float32, CPU, has_padding_block=True)
    per_sequence = 128 * 2 * 8 * 4  # tokens, heads, head_dim, bytes
    many = config(models / "target").model_copy(update={"max_num_seqs": 4096, "max_num_batched_tokens": 10_000})
    most = max(shape.num_seqs for shape in graphed(many, model, kv)._shapes.shapes)
    assert most == min(4096, 2**28 // per_sequence)


# --- attention that a graph can be captured of ------------------------------------------------------------------------

OPTIONS = [AttentionOptions(), AttentionOptions(window=7, softcap=3.0, scale=0.2)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 16), (9, 3, 8), (2, 2, 12)], ids=str)
def test_dense_attention_over_a_padded_step_agrees_with_the_reference(
    heads: tuple[int, int, int], options: AttentionOptions
) -> None:
    lengths = [40, 3, 61]
    cache = make_cache(lengths, heads)
    batch = cache.batch([(0, 37, 3), (1, 2, 1), (2, 55, 6)])
    query = queries(batch.num_tokens, heads)
    expected = ReferenceAttention().attend(query, cache.keys, cache.values, batch, options)

    shapes = GraphShapes.of(4, 64, 64, 16)
    shape = shapes.fit(3, batch.num_tokens, batch.max_query_len, batch.block_table.shape[1])
    assert isinstance(shape, GraphShape)
    keys, values = (torch.cat([part, torch.full_like(part[:1], torch.nan)]) for part in (cache.keys, cache.values))
    kv = KVCache((keys,), (values,), has_padding_block=True)
    static = StaticBatches.allocate(shapes, kv, CPU)
    padded = static.batch(shape)
    static.load(batch.host, padded)
    rows = torch.full((shape.num_tokens, *query.shape[1:]), torch.nan)
    rows[: len(query)] = query
    actual = attend_dense(rows, keys, values, padded, options)
    torch.testing.assert_close(actual[: len(query)], expected, rtol=1e-5, atol=5e-6)
