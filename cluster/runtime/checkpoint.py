"""Reads a model directory in transformers' format: config.json and safetensors, whole or in shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor

from cluster.runtime.model_spec import ModelError, ModelSpec, parse_eos

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def load_spec(path: Path) -> ModelSpec:
    """The spec of a model directory of the Llama family, see read_config.

    Raises ModelError, and its subclass UnsupportedModel for what the family's decoder does not compute.
    """
    try:
        return ModelSpec.from_pretrained_config(read_config(path))
    except ModelError as error:
        raise type(error)(f"{path}: {error}") from error


def read_config(path: Path) -> dict[str, Any]:
    """A model directory's config.json, with every id that ends a sequence in `eos_token_id`.

    These are all that generation_config.json names, or else config.json, and the tokenizer's own. Raises ModelError.
    """
    config = _read_json(path / "config.json")
    generation = path / "generation_config.json"
    if generation.is_file() and (eos := _read_json(generation).get("eos_token_id")) is not None:
        config["eos_token_id"] = eos
    try:
        named = parse_eos(config)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    config["eos_token_id"] = sorted(named | _tokenizer_eos(path))
    return config


def _tokenizer_eos(path: Path) -> frozenset[int]:
    """The id of the tokenizer's end-of-sequence token: some instruction models name their end of turn nowhere else."""
    vocabulary = path / "tokenizer.json"
    settings = [path / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
    named = [_read_json(file).get("eos_token") for file in settings if file.is_file()]
    tokens = [token.get("content") if isinstance(token, dict) else token for token in named]
    token = next((token for token in tokens if isinstance(token, str)), None)
    if token is None or not vocabulary.is_file():
        return frozenset()
    try:
        token_id = Tokenizer.from_file(str(vocabulary)).token_to_id(token)
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{vocabulary} cannot be read: {error}") from error
    return frozenset() if token_id is None else frozenset({token_id})


@dataclass(frozen=True, slots=True)
class Part:
    """The indices that are read of a tensor's dimension of `size`."""

    size: int
    indices: range


class Checkpoint:
    """Owns the open weight files of one model directory; tensors are copied out one at a time.

    Every complaint is a ModelError that names the directory and the tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = ExitStack()
        try:
            self._shard_of = self._open()
        except BaseException:
            self._files.close()
            raise
        self._unread = set(self._shard_of)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def tensor(self, name: str, *shape: int | Part) -> Tensor:
        """Read one tensor of the given shape, or the given part of it and no more."""
        if name not in self._shard_of:
            raise ModelError(f"{self.path} has no tensor {name}")
        stored = self._shard_of[name].get_slice(name)
        found, expected = list(stored.get_shape()), [dim.size if isinstance(dim, Part) else dim for dim in shape]
        if found != expected:
            raise ModelError(f"{self.path}: tensor {name} has shape {found}, its config says {expected}")
        self._unread.discard(name)
        indices = tuple(_slice_of(dim) for dim in shape)
        if all(index == slice(0, size) for index, size in zip(indices, found, strict=True)):
            whole: Tensor = self._shard_of[name].get_tensor(name)
            return whole
        part: Tensor = stored[indices]  # a view of the mapped file
        return part.clone(memory_format=torch.contiguous_format)

    def weight(self, name: str, *shape: int | Part) -> Tensor:
        """Read one tensor of floating-point numbers, see tensor()."""
        tensor = self.tensor(name, *shape)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(
                f"{self.path}: tensor {name} has dtype {kind}, only float32, float16 and bfloat16 are supported"
            )
        return tensor

    def refuse_unread(self, ignored: tuple[str, ...]) -> None:
        """A tensor that nobody read means that the model computes something the decoder does not."""
        unread = sorted(name for name in self._unread if not name.endswith(ignored))
        if unread:
            raise ModelError(f"{self.path}: config.json does not account for tensor {unread[0]} ({len(unread)} such)")

    def _open(self) -> Mapping[str, Any]:
        if (self.path / _WHOLE).is_file():
            shard = self._open_file(_WHOLE)
            return dict.fromkeys(shard.keys(), shard)
        if (self.path / _INDEX).is_file():
            return self._open_shards(_read_json(self.path / _INDEX))
        raise ModelError(f"{self.path} has no {_WHOLE}; other formats of weights are not supported")

    def _open_shards(self, index: dict[str, Any]) -> Mapping[str, Any]:
        shard_names = index.get("weight_map")
        if not isinstance(shard_names, dict):
            raise ModelError(f"{self.path / _INDEX} has no weight_map")
        shards = {name: self._open_file(name) for name in sorted(set(shard_names.values()))}
        held = {name: set(shard.keys()) for name, shard in shards.items()}
        for tensor, shard in shard_names.items():
            if tensor not in held[shard]:
                raise ModelError(f"{self.path / shard} has no tensor {tensor}, which the index promises")
        return {tensor: shards[shard] for tensor, shard in shard_names.items()}

    def _open_file(self, name: str) -> Any:
        file = self.path / name
        try:
            return self._files.enter_context(safe_open(file, framework="pt"))
        except FileNotFoundError as error:
            raise ModelError(f"{file} is missing") from error
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is damaged or incomplete ({error})") from error


def _slice_of(dim: int | Part) -> slice:
    return slice(dim.indices.start, dim.indices.stop) if isinstance(dim, Part) else slice(0, dim)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} is not a model: it has no {path.name}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value
