"""How kernels become machine code: compiled at first use, without the GIL, kept on disk for later processes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

Record = Any  # one record of a kernel's arguments, inside compiled code
Records = NDArray[np.void]

_F = TypeVar("_F", bound=Callable[..., Any])


def _cache_directory() -> Path:
    """A folder of this version of the kernels only.

    numba notices a change in the file of the cached function, not in the files that it calls into; a folder named
    by all of the sources cannot mix versions. The sampler's constants come from the core.
    """
    kernels, core = Path(__file__).parent, Path(__file__).parents[2] / "core"
    sources = [*sorted(kernels.rglob("*.py")), core / "keyed_noise.py", core / "sampling.py"]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    chosen = numba.config.CACHE_DIR or os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline"
    return Path(chosen) / "kernels" / digest


numba.config.CACHE_DIR = str(_cache_directory())


def native(function: _F) -> _F:
    """A kernel function: compiled per argument types at first call, releases the GIL, IEEE arithmetic as written."""
    return cast(_F, numba.njit(nogil=True, cache=True, error_model="numpy")(function))


class TaskBody:
    """Owns one compiled task function `body(args, task)`, callable from native threads by its address.

    `args` points to one record of the given dtype, which is shared by all tasks of a launch.
    """

    def __init__(self, body: Callable[..., None], record: np.dtype[np.void]) -> None:
        self._body = body
        self._record = record

    @cached_property
    def _compiled(self) -> Any:
        arguments = types.CPointer(numba.from_dtype(self._record))
        compile_body = numba.cfunc(types.void(arguments, types.intp), cache=True, error_model="numpy", nopython=True)
        return compile_body(self._body)

    @property
    def address(self) -> int:
        """Machine address of the compiled function; compiles or loads it at first use."""
        return cast(int, self._compiled.address)


def task_body(record: np.dtype[np.void]) -> Callable[[Callable[..., None]], TaskBody]:
    """Decorator: make `body(args, task)` a TaskBody whose `args` is a pointer to `record`."""
    return lambda body: TaskBody(body, record)
