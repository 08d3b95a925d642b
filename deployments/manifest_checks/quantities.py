"""Kubernetes' quantities as numbers."""

from __future__ import annotations

import re
from typing import Final

_FACTORS: Final = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_QUANTITY: Final = re.compile(r"([0-9.]+)([a-zA-Z]*)")


def amount(quantity: str | float) -> float:
    """`2`, `500m` or `3Gi` as a number. Raises ValueError."""
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None or match[2] not in _FACTORS:
        raise ValueError(f"{quantity!r} is not a quantity")
    return float(match[1]) * _FACTORS[match[2]]
